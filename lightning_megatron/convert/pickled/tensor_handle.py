"""Where in a file are the rows of a pickled tensor, and how are some of them read without the others?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_megatron.convert.plain_reads import read_into


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A run of numbers in a file."""

    file: Path
    offset: int
    """Of the first byte, from the beginning of the file."""
    num_bytes: int
    is_little_endian: bool = True


@dataclass(frozen=True, kw_only=True)
class TensorHandle:
    """A tensor in a file, of which nothing was read."""

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In items."""
    first: int
    """Of its items in the storage."""

    def __post_init__(self) -> None:
        """Check that it lies inside its storage, and no item is shared.

        Raises:
            ValueError: If not.
        """
        sizes = (*self.shape, *self.stride, self.first)
        if len(self.shape) != len(self.stride) or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"a tensor of shape {list(self.shape)[:8]}, stride {list(self.stride)[:8]}")
        items = self.storage.num_bytes // self.dtype.itemsize
        if self.numel and (self.first + self._span(self.shape[0] if self.shape else 1) > items or self.numel > items):
            raise ValueError(f"a tensor of shape {list(self.shape)[:8]} in a storage of {items:,} items")

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return self.numel * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``, on the CPU, contiguous: [stop - start, ...].

        Raises:
            CheckpointError: If the file cannot be read, or ends too early.
        """
        shape = (stop - start, *self.shape[1:])
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype)
        size = self.dtype.itemsize
        buffer = torch.empty(self._span(stop - start) * size, dtype=torch.uint8)
        begin = self.first + start * self.stride[0]
        read_into(buffer, self.storage.file, self.storage.offset + begin * size)
        if not self.storage.is_little_endian and size > 1:
            buffer = buffer.view(-1, size).flip(1).flatten()
        return buffer.view(self.dtype).as_strided(shape, self.stride).contiguous()

    def whole(self) -> torch.Tensor:
        """All of it; a single number has no axis, and comes as such."""
        if self.shape:
            return self.rows(0, self.shape[0])
        return replace(self, shape=(1,), stride=(1,)).rows(0, 1)[0]

    def _span(self, rows: int) -> int:
        """Items from the first to the last one of that many rows."""
        shape = (rows, *self.shape[1:]) if self.shape else ()
        return 1 + sum((length - 1) * step for length, step in zip(shape, self.stride, strict=True))
