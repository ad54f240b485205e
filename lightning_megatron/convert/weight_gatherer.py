"""``WeightGatherer``: gathers the Hugging Face tensors of a sharded model to rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

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
            s for s in shards_of(chunks, model) if s.is_main_replica and include(s.region.key)
        ]
        found: dict[Key, dict[tuple[int, ...], tuple[int, int, Region]]] = {}
        for rank, regions in enumerate(all_gather([shard.region for shard in self._shards])):
            for index, region in enumerate(regions):
                found.setdefault(region.key, {}).setdefault(region.offset, (rank, index, region))
        self._parts = {key: list(found[key].values()) for key in sorted_keys(found, model)}

    def contents(self) -> dict[str, Stored]:
        """Shape and dtype of each Hugging Face tensor, in the order of ``tensors``."""
        contents: dict[str, Stored] = {}
        for key, parts in self._parts.items():
            region = parts[0][2]
            tensors = self._rules[key.name].tensors(region.shape, key.layer, key.expert)
            contents |= {name: Stored(shape, region.dtype) for name, shape in tensors.items()}
        return contents

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield name and values of each Hugging Face tensor: CPU tensors of the parameters' dtype on rank 0, else None.

        A tensor may share memory with a parameter.
        """
        for key in self._parts:
            rule, tensor = self._rules[key.name], self._gather(key)
            names = rule.names(*key[1:])
            if tensor is None:
                yield from ((name, None) for name in names if name)
                continue
            rows = tensor if rule.order is None else tensor[torch.argsort(rule.order)]
            for name, part in zip(names, rows.split(rule.rows or len(rows)), strict=True):
                if name:
                    yield name, (part.t() if rule.transposed else part).contiguous()

    def _gather(self, key: Key) -> torch.Tensor | None:
        """Gather one of Megatron's tensors, without padding, to rank 0; None on other ranks."""
        parts, shape = self._parts[key], self._parts[key][0][2].shape
        if dist.get_rank() != 0:
            for rank, index, _ in parts:
                if rank == dist.get_rank():
                    # As bytes, since gloo does not send every dtype.
                    data = self._shards[index].data.cpu().contiguous().view(-1).view(torch.uint8)
                    dist.send(data, 0, group=self._group)
            return None
        if len(parts) == 1:
            return self._receive(*parts[0])[: shape[0]]
        tensor = torch.empty(shape, dtype=parts[0][2].dtype)
        for rank, index, region in parts:
            tensor[region.unpadded.slices] = self._receive(rank, index, region)[
                : region.unpadded.size[0]
            ]
        return tensor

    def _receive(self, rank: int, index: int, region: Region) -> torch.Tensor:
        if rank == 0:
            return self._shards[index].data.cpu()
        buffer = torch.empty(math.prod(region.size) * region.dtype.itemsize, dtype=torch.uint8)
        dist.recv(buffer, rank, group=self._group)
        return buffer.view(region.dtype).view(region.size)
