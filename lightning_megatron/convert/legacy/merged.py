"""How do the shards of one tensor on all tensor-parallel ranks make the whole tensor, read by rows?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.legacy.names import split_axis
from lightning_megatron.convert.legacy.qkv import shard_order
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.pieces import index
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.models.config import ModelConfig

_KINDS = {".linear_qkv.": 3, ".linear_kv.": 2}
"""Of rows that a head has in one matrix: queries, keys and values."""
_READ_TOO_MUCH = 2
"""Rows between the wanted ones are read, too, if that makes at most so many times as many."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged:
    """A whole tensor made of shards."""

    name: str
    shards: tuple[TensorHandle, ...]
    """Of the tensor-parallel ranks, alike in shape; one if every rank has all."""
    axis: Literal[0, 1] | None
    """Along which they are put together."""
    order: torch.Tensor | None = None
    """[rows], int64: which row of the concatenated shards is the i-th row; None if they are the same."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, with padding."""
        shape = list(self.shards[0].shape)
        if self.axis is not None and self.axis < len(shape):  # else it is of another model, which is said later
            shape[self.axis] *= len(self.shards)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of all shards."""
        return self.shards[0].dtype

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: [stop - start, ...].

        Raises:
            CheckpointError: If a file is damaged.
        """
        if self.axis != 0:
            blocks = [shard.rows(start, stop) for shard in self.shards]
            return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        if len(self.shards) == 1 and self.order is None:
            return self.shards[0].rows(start, stop)
        result = Filling(self.name, torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype))
        rows = torch.arange(start, stop) if self.order is None else self.order[start:stop]
        per_shard = self.shards[0].shape[0]
        for number, shard in enumerate(self.shards):
            places = ((rows >= number * per_shard) & (rows < (number + 1) * per_shard)).nonzero().flatten()
            if len(places):
                _fill(result, places, shard, rows[places] - number * per_shard)
        return result.whole()


def _fill(result: Filling, places: torch.Tensor, shard: TensorHandle, rows: torch.Tensor) -> None:
    """Put the rows ``rows`` of a shard into the places ``places`` of ``result``."""
    first, last = int(rows.min()), int(rows.max())
    if last - first < _READ_TOO_MUCH * len(rows):
        result.put(index(places), shard.rows(first, last + 1)[index(rows - first)])
        return
    borders = (rows.diff() != 1).nonzero().flatten() + 1
    for part, targets in zip(rows.tensor_split(borders), places.tensor_split(borders), strict=True):
        result.put(index(targets), shard.rows(int(part[0]), int(part[-1]) + 1))


def whole_shape(key: Key, shards: Sequence[TensorHandle]) -> tuple[int, ...]:
    """Of the tensor ``key`` that these shards make, with padding."""
    return Merged(name=key.name, shards=tuple(shards), axis=split_axis(key.name)).shape


def merged(key: Key, shards: Sequence[TensorHandle], model: ModelConfig, version: float) -> Merged:
    """How a tensor is put together, its rows in Megatron-Core's order.

    Args:
        key: Which tensor.
        shards: Of all tensor-parallel ranks.
        model: Of which it is.
        version: Of the checkpoint.
    """
    axis, tp = split_axis(key.name), len(shards)
    if axis is None:
        return Merged(name=key.name, shards=(shards[0],), axis=None)
    order = None
    if kinds := next((number for module, number in _KINDS.items() if module in key.name), None):
        of_shard = shard_order(version, kinds, model.num_attention_heads // tp, model.kv_channels)
        if of_shard is not None and "layer_norm" not in key.name:
            order = torch.cat([of_shard + rank * len(of_shard) for rank in range(tp)])
    elif model.gated_linear_unit and ".linear_fc1." in key.name and tp > 1:
        # Each shard has its part of the gates, then its part of the other branch.
        rows = shards[0].shape[0]
        order = torch.arange(rows * tp).view(tp, 2, rows // 2).transpose(0, 1).flatten()
    return Merged(name=key.name, shards=tuple(shards), axis=axis, order=order)
