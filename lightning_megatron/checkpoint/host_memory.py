"""Host memory for the copy of a run that is being saved."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_ALIGNMENT = 64
"""Alignment of tensors in the block in bytes, enough for any dtype."""
_TOUCH = 64 * 2**20
_TOUCHING_THREADS = 8
_PINNED_AT_ONCE = 2**30
"""Bytes pinned at once; meanwhile the driver holds locks that training's kernels need, too."""


class HostMemory:
    """A block of host memory that grows on demand and is then reused.

    It is kept from one save to the next, because on a GPU it is pinned (copies run at the speed of the bus) and pinning
    takes longer than copying: of 112 GB on two H200s 12 of the first save's 13.7 s, which ``preallocate`` avoids. It is
    as large as the largest save so far: one copy of this rank's shards.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        """Allocate nothing yet.

        Args:
            in_place: Whether tensors on a CPU do not change while the copies are used, so that they need not be copied.
        """
        self._in_place = in_place
        self._block: mmap.mmap | None = None
        self._pinned: list[torch.Tensor] = []
        """Pinned pieces of the block."""
        self._preparing: threading.Thread | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy ``tensors`` into host memory; the copies are complete on return and valid until the next call.

        Every copy has a storage of its own size, so that ``torch.save`` writes no neighbours.
        """
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if self._in_place and not on_gpu:
            return [_with_own_storage(tensor.detach()) for tensor in tensors]
        self._wait()
        self._reserve(tensors)
        copies = list(map(self._copy_to, tensors, _offsets(tensors)))
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _copy_to(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy ``tensor`` to ``offset``; CUDA refuses a copy that reaches from one pinned piece into another."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = len(data)
        if size == 0 or self._block is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        target = torch.frombuffer(self._block, dtype=torch.uint8, count=size, offset=offset)
        cuts = list(range(-offset % _PINNED_AT_ONCE, size, _PINNED_AT_ONCE))
        parts = zip(target.tensor_split(cuts), data.tensor_split(cuts), strict=True)
        for part, source in parts:
            part.copy_(source, non_blocking=True)
        return target.view(tensor.dtype).view(tensor.shape)

    def preallocate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start to allocate memory for copies of ``tensors``, in a thread."""
        self._wait()
        self._preparing = threading.Thread(target=self._reserve, args=(tensors,), daemon=True)
        self._preparing.start()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def release(self) -> None:
        """Free the memory; copies must not be used any more."""
        self._wait()
        self._unpin()

    def _unpin(self) -> None:
        for piece in self._pinned:
            _call_cuda("cudaHostUnregister", piece.data_ptr())
        self._block = None
        self._pinned = []

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate memory for ``tensors`` in huge pages, touch it, and pin it if they are on a GPU."""
        size = _offsets(tensors)[-1]
        if size <= len(self._block or b""):
            return
        self._unpin()
        self._block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._block.madvise(mmap.MADV_HUGEPAGE)
        gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a new thread would create a context on the first GPU
        block = torch.frombuffer(self._block, dtype=torch.uint8)
        with ThreadPoolExecutor(_TOUCHING_THREADS) as pool:
            for piece in block.split(_PINNED_AT_ONCE):
                # Touched memory is pinned faster.
                list(pool.map(torch.Tensor.zero_, piece.split(_TOUCH)))
                start = piece.data_ptr()
                if gpu is not None and _call_cuda("cudaHostRegister", start, piece.numel(), 0):
                    self._pinned.append(piece)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Offset of each tensor in a block, and last the size of the block."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    return [0, *itertools.accumulate(sizes)]


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that is a part of a larger storage."""
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone()


def _call_cuda(function: str, *args: Any) -> bool:
    """Call a function of the CUDA runtime; returns whether it succeeded. Without pinning, copies are only slower."""
    succeeded = int(getattr(torch.cuda.cudart(), function)(*args)) == 0
    if not succeeded:
        # The runtime keeps the error until the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return succeeded
