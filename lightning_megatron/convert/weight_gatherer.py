"""``WeightGatherer``: gathers the Hugging Face tensors of a sharded model to rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.shards import (
    Key,
    Region,
    all_gather,
    host_group,
    shards_of,
    sorted_keys,
)
from lightning_megatron.convert.source import Stored
from lightning_megatron.models.config import ModelConfig


class _Part(NamedTuple):
    """A shard of a tensor, and where it is."""

    rank: int
    number: int
    """Among the shards of its rank."""
    region: Region


class WeightGatherer:
    """Gather the Hugging Face tensors of a sharded model to rank 0, one at a time.

    Collective over the world: every rank must construct one and iterate over ``tensors``.

    Args:
        chunks: This rank's model chunks. The values of ``parameter.data`` are gathered, which may be gradients.
        model: Config that the chunks were built from.
        include: Selects tensors by key; all by default.
    """

    def __init__(
        self,
        chunks: Iterable[Any],
        model: ModelConfig,
        include: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        self._group = host_group()
        self._rules = {rule.megatron: rule for rule in rules_of(model)}
        self._shards = [
            shard
            for shard in shards_of(chunks, model)
            if shard.is_main_replica and include(shard.region.key)
        ]
        found: dict[Key, dict[tuple[int, ...], _Part]] = {}
        own_regions = [shard.region for shard in self._shards]
        for rank, regions in enumerate(all_gather(own_regions)):
            for index, region in enumerate(regions):
                parts = found.setdefault(region.key, {})
                parts.setdefault(region.offset, _Part(rank, index, region))
        keys = sorted_keys(found, model)
        self._parts = {key: list(found[key].values()) for key in keys}

    def contents(self) -> dict[str, Stored]:
        """Shape and dtype of each Hugging Face tensor, in the order of ``tensors``."""
        contents: dict[str, Stored] = {}
        for key, parts in self._parts.items():
            region = parts[0].region
            tensors = self._rules[key.name].tensors(region.shape, key.layer, key.expert)
            for name, shape in tensors.items():
                contents[name] = Stored(shape, region.dtype)
        return contents

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield name and values of each Hugging Face tensor: CPU tensors of the parameters' dtype on rank 0, else None.

        A tensor may share memory with a parameter. Experts of one tensor are held until they are complete.
        """
        stacks: dict[str, list[Tensor | None]] = {}
        for key, name, values in self._tensors_of_keys():
            num_stacked = self._rules[key.name].num_stacked
            if not num_stacked:
                yield name, values
                continue
            stack = stacks.setdefault(name, [])
            stack.append(values)
            if len(stack) == num_stacked:
                # On other ranks than the first, no part has values.
                parts = [part for part in stacks.pop(name) if part is not None]
                stacked = None
                if parts:
                    stacked = torch.stack(parts)
                yield name, stacked

    def _tensors_of_keys(self) -> Iterator[tuple[Key, str, Tensor | None]]:
        """Yield key, name and values of each part of a Hugging Face tensor that comes from one of Megatron's."""
        for key in self._parts:
            rule = self._rules[key.name]
            tensor = self._gather(key)
            names = rule.names(key.layer, key.expert)
            if tensor is None:
                yield from ((key, name, None) for name in names if name)
                continue
            if rule.order is not None:
                tensor = tensor[torch.argsort(rule.order)]
            parts = tensor.split(rule.rows or len(tensor))
            for name, part in zip(names, parts, strict=True):
                if rule.transposed:
                    part = part.t()
                if rule.stored_shape is not None:
                    part = part.reshape(rule.stored_shape)
                if name:
                    yield key, name, part.contiguous()

    def _gather(self, key: Key) -> Tensor | None:
        """Gather one of Megatron's tensors, without padding, to rank 0; None on other ranks."""
        parts = self._parts[key]
        if dist.get_rank() != 0:
            for part in parts:
                if part.rank == dist.get_rank():
                    self._send(part)
            return None
        first = parts[0].region
        if len(parts) == 1:
            return self._receive(parts[0])[: first.shape[0]]
        tensor = torch.empty(first.shape, dtype=first.dtype)
        for part in parts:
            region = part.region.unpadded
            rows = self._receive(part)
            tensor[region.slices] = rows[: region.size[0]]
        return tensor

    def _send(self, part: _Part) -> None:
        # As bytes, since gloo does not send every dtype.
        values = self._shards[part.number].data.cpu().contiguous()
        data = values.view(-1).view(torch.uint8)
        dist.send(data, 0, group=self._group)

    def _receive(self, part: _Part) -> Tensor:
        if part.rank == 0:
            return self._shards[part.number].data.cpu()
        region = part.region
        num_bytes = math.prod(region.size) * region.dtype.itemsize
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        dist.recv(buffer, part.rank, group=self._group)
        return buffer.view(region.dtype).view(region.size)
