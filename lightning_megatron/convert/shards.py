"""Shards of a live model's weights.

Every conversion passes through a live model: each format has a ``Source``, whose tensors ``WeightLoader`` copies into
the shards, and a save function that reads the shards. *Full tensor* means the shards of all ranks put together without
vocabulary padding, under Megatron-Core's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

TIMEOUT = timedelta(minutes=30)
"""Of collectives in which ranks wait while another one reads or writes files."""
_LAYER_NUMBER = re.compile(r"(.*?\blayers)\.(\d{1,9})\.(.+)")
_STACKS = ("", "encoder", "decoder")
EXPERTS = ".experts.experts."
"""Part of the name of a tensor that stacks one matrix per expert."""


class Key(NamedTuple):
    """Identifies one tensor of a model."""

    name: str
    """``Rule.megatron``: the name without layer index, e.g. ``decoder.layers.mlp.linear_fc1.weight``."""
    layer: int | None = None
    """Global layer index in its stack, from 0, over all pipeline stages; None for tensors outside layers."""
    expert: int | None = None
    """Index of the expert in its layer, from 0; None for tensors that belong to no expert."""

    def __str__(self) -> str:
        """Name with layer and expert index, for messages."""
        name = self.name
        if self.layer is not None:
            name = name.replace(".layers.", f".layers.{self.layer}.", 1)
        if self.expert is not None:
            name = name.replace(EXPERTS, f".experts.{self.expert}.", 1)
        return name


def parse_key(name: str) -> Key:
    """Split the layer index off a name such as ``decoder.layers.3.mlp.linear_fc1.weight``."""
    parts = _LAYER_NUMBER.fullmatch(name)
    if parts is None:
        return Key(name)
    return Key(f"{parts[1]}.{parts[3]}", int(parts[2]))


@dataclass(frozen=True, kw_only=True)
class Region:
    """Region of a full tensor that a shard covers; metadata only, exchanged between ranks."""

    key: Key
    shape: tuple[int, ...]
    """Of the full tensor, without vocabulary padding."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the shard, padding included."""
    dtype: torch.dtype

    @property
    def unpadded(self) -> Region:
        """The region without vocabulary padding."""
        left = self.shape[0] - self.offset[0]
        rows = max(0, min(self.size[0], left))
        return replace(self, size=(rows, *self.size[1:]))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the region in the full tensor."""
        bounds = zip(self.offset, self.size, strict=True)
        return tuple(slice(start, start + size) for start, size in bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Shard of a tensor on this rank."""

    region: Region
    data: Tensor
    """Shares the parameter's memory."""
    is_main_replica: bool
    """Whether this is the first of the replicas of the shard on all ranks and chunks (``replica_id`` 0)."""


def shards_of(chunks: Iterable[Any], model: ModelConfig) -> list[Shard]:
    """This rank's shards of all weights that have a ``Rule``, in the order of ``sorted_keys`` and of their rows.

    Args:
        chunks: This rank's model chunks, wrapped or not.
        model: Config that the chunks were built from.
    """
    # The rules exclude the expert bias, which the engine initializes.
    names = {rule.megatron for rule in rules_of(model)}
    shards = []
    for _, parts in sharded_parameters(chunks):
        for part in parts:
            shard = _shard(part, model)
            if shard.region.key.name in names:
                shards.append(shard)
    keys = sorted_keys({shard.region.key for shard in shards}, model)
    index = {key: i for i, key in enumerate(keys)}
    return sorted(shards, key=lambda shard: (index[shard.region.key], shard.region.offset))


def named_shards(chunks: Iterable[Any]) -> Iterator[tuple[Key, Tensor]]:
    """This rank's shards of all tensors of a checkpoint with their keys, also of those without a ``Rule``."""
    for _, parts in sharded_parameters(chunks):
        for part in parts:
            if part.data is not None:
                yield key_of(part), part.data.detach()


def sharded_parameters(
    chunks: Iterable[Any],
) -> Iterator[tuple[Tensor, list[ShardedTensor]]]:
    """Each parameter with its sharded tensors in checkpoints: one, or two for a gated linear layer."""
    # Imported here, as reading headers needs no engine, whose import takes seconds.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from lightning_megatron.engine.wrap import unwrap

    for chunk in chunks:
        for tensor in nested_values(unwrap(chunk).sharded_state_dict()):
            if isinstance(tensor, ShardedTensorFactory):
                yield tensor.data, list(nested_values({"": tensor.build()}))
            elif isinstance(tensor, ShardedTensor):
                yield tensor.data, [tensor]


def key_of(tensor: ShardedTensor) -> Key:
    """Key of a shard; of one that covers several layers or experts, that of the first."""
    stacked = [int(index) for index in tensor.global_offset[: tensor.prepend_axis_num]]
    key = parse_key(tensor.key)
    indices = stacked if key.layer is None else [key.layer, *stacked]
    return Key(key.name, *indices)


def _shard(tensor: ShardedTensor, model: ModelConfig) -> Shard:
    axes = tensor.prepend_axis_num
    key = key_of(tensor)
    shape = tuple(tensor.global_shape)[axes:]
    if key.name in VOCABULARY:
        shape = (model.vocab_size, *shape[1:])
    region = Region(
        key=key,
        shape=shape,
        offset=tuple(tensor.global_offset)[axes:],
        size=tuple(tensor.local_shape),
        dtype=tensor.dtype,
    )
    replica = tensor.replica_id
    is_main_replica = not any(replica) if isinstance(replica, tuple) else not replica
    return Shard(
        region=region,
        data=tensor.data.detach(),
        is_main_replica=is_main_replica,
    )


def host_group() -> Any:
    """Process group of all ranks on the CPU, with a timeout that is long enough for files."""
    from lightning_megatron.engine import groups  # the engine's import takes seconds

    return groups.host_group(TIMEOUT)


def all_gather(value: Any) -> list[Any]:
    """The ``value`` of each rank."""
    return gather_objects(value, host_group())


def sorted_keys(keys: Iterable[Key], model: ModelConfig) -> list[Key]:
    """Sort keys: tensors outside layers first, then each stack (T5's encoder before its decoder) layer by layer."""
    index = {rule.megatron: i for i, rule in enumerate(rules_of(model))}

    def order(key: Key) -> tuple[int, int, int, int]:
        stack = key.name.split(".")[0] if key.layer is not None else ""
        return _STACKS.index(stack), key.layer or 0, key.expert or 0, index[key.name]

    return sorted(keys, key=order)
