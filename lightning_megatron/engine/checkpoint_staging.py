"""Where are the shards while threads write them and training goes on? In one block of host memory of their size.

The block is kept from one save to the next, because on a GPU it is pinned (copies run at the speed of the bus) and
pinning takes longer than copying. It is as large as the largest save so far: one copy of this rank's shards.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_ALIGNMENT = 64
"""Bytes; any dtype may begin there."""
_TOUCH = 64 * 2**20
_THREADS = 8


class HostMemory:
    """A block of host memory that grows to what is asked for and is then reused."""

    def __init__(self) -> None:
        """Nothing is allocated yet."""
        self._block: mmap.mmap | None = None
        self._size = 0
        self._pinned: torch.Tensor | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of ``tensors`` in host memory, complete when this returns and valid until the next call.

        Every copy has a storage of its own size, so that ``torch.save`` writes no neighbours.
        """
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._reserve(size, pin=on_gpu)
        copies = [self._view(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back; copies must not be used any more."""
        if self._pinned is not None:
            _call_cuda("cudaHostUnregister", self._pinned.data_ptr())
        self._block, self._size, self._pinned = None, 0, None

    def _reserve(self, size: int, *, pin: bool) -> None:
        if size > self._size:
            self.release()
            self._block, self._size = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size
            self._block.madvise(mmap.MADV_HUGEPAGE)
        if pin and self._pinned is None and self._block is not None:
            whole = torch.frombuffer(self._block, dtype=torch.uint8)
            with ThreadPoolExecutor(_THREADS) as pool:  # memory that has been touched is pinned faster
                list(pool.map(torch.Tensor.zero_, whole.split(_TOUCH)))
            if _call_cuda("cudaHostRegister", whole.data_ptr(), size, 0):
                self._pinned = whole

    def _view(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if tensor.numel() == 0 or self._block is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        flat = torch.frombuffer(self._block, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.view(tensor.shape)


def _call_cuda(function: str, *args: Any) -> bool:
    """Whether a function of the CUDA runtime succeeded; without pinning, copies are only slower."""
    succeeded = int(getattr(torch.cuda.cudart(), function)(*args)) == 0
    if not succeeded:
        with contextlib.suppress(RuntimeError):  # the runtime remembers the error until the next kernel is launched
            torch.zeros(1, device="cuda").add_(1)
    return succeeded
