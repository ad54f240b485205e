"""Which rows and columns of a whole tensor does one tensor-parallel rank of a legacy checkpoint hold?

Rows of queries, keys and values lie head after head (or group after group), so that a rank's heads are a block of rows.
With more ranks than query groups the rows are cut evenly all the same, within a group: Megatron-Core holds them so;
Megatron-LM's own models refuse such a tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.legacy.names import VOCABULARY, split_axis
from lightning_megatron.convert.stored.base import Key, Spec, StoredModel
from lightning_megatron.models.config import ModelConfig

_BLOCK_BYTES = 8 << 20
"""What is read at a time."""
_FC1 = ".mlp.linear_fc1."


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How a model's tensors are cut over tp ranks."""

    model: ModelConfig
    """What is cut."""
    size: int
    """tp."""
    padded_vocab_size: int
    """Rows of the embedding over all ranks."""

    def shape(self, key: Key, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of a rank's shard of a tensor that has the shape ``whole`` without padding."""
        axis = split_axis(key.name)
        rows = self.padded_vocab_size if key.name in VOCABULARY else whole[0]
        if axis is None:
            return whole
        return (rows // self.size, *whole[1:]) if axis == 0 else (rows, whole[1] // self.size, *whole[2:])

    def read(self, source: StoredModel, key: Key, spec: Spec, rank: int) -> torch.Tensor:
        """The shard of ``rank``, zero in rows that pad the vocabulary.

        Args:
            source: Where the whole tensor is read from, some rows at a time.
            key: Which tensor.
            spec: What it is there.
            rank: The tensor-parallel rank.

        Returns:
            A tensor on the CPU with memory of its own, in the source's dtype.
        """
        shape = self.shape(key, spec.shape)
        shard = Filling(key.name, torch.empty(shape, dtype=spec.dtype))
        columns = slice(None)
        if split_axis(key.name) == 1:
            columns = slice(rank * shape[1], (rank + 1) * shape[1])
        row_bytes = max(1, spec.num_bytes // max(1, spec.shape[0]))
        step = max(1, _BLOCK_BYTES // row_bytes)
        filled = 0
        for start, stop in self._ranges(key, rank, shape[0], spec.shape[0]):
            for first in range(start, stop, step):
                rows = source.read(key, first, min(first + step, stop))
                shard.put(slice(filled, filled + len(rows)), rows[:, columns] if rows.dim() > 1 else rows)
                filled += len(rows)
        if key.name in VOCABULARY:
            shard.put(slice(max(0, spec.shape[0] - rank * shape[0]), None), 0)
        return shard.whole()

    def _ranges(self, key: Key, rank: int, rows: int, all_rows: int) -> Iterator[tuple[int, int]]:
        """Which rows of the whole tensor become the ``rows`` of a rank's shard, one range after the other."""
        if split_axis(key.name) != 0:
            yield 0, all_rows
        elif self.model.gated_linear_unit and _FC1 in key.name and "layer_norm" not in key.name:
            # The gates of this rank, then its other branch.
            half = rows // 2
            for start in (rank * half, all_rows // 2 + rank * half):
                yield start, start + half
        else:
            yield min(rank * rows, all_rows), min((rank + 1) * rows, all_rows)
