"""Host memory of an exact size that a GPU reads and writes beside its kernels.

Pages that are pinned are copied at the speed of the bus, and neither host nor kernels wait. torch's own pinned tensors
are rounded up to powers of two, and come from an allocator that keeps them: of 90 GiB they would take 128. Here a
block is mapped in huge pages, touched by several threads, and registered with the driver.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_TOUCH = 64 * 2**20
_TOUCHING_THREADS = 8


class PinnedBlock:
    """A block of host memory, all zeros at first. It is pinned on a machine with a GPU until it is released."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        pinned_at_once: int | None = None,
    ) -> None:
        """Map the block, and pin it if ``device`` is a GPU.

        Args:
            num_bytes: Its size.
            device: Device that copies from and to it.
            pinned_at_once: Bytes that are pinned at once, a multiple of the page size; None: all. Meanwhile the driver
                holds locks that kernels need, too; but CUDA refuses a copy that reaches from one piece into another.
        """
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._pinned: list[int] = []
        """Addresses of pieces that are pinned."""
        self.is_pinned = device.type == "cuda" and num_bytes > 0
        """Whether all of it is; otherwise copies are only slower, and the host waits for them."""
        if self.is_pinned:
            if device.index is not None:
                # A new thread would create a context on the first GPU.
                torch.cuda.set_device(device)
            self._pin(pinned_at_once or num_bytes)
        self._unpin = weakref.finalize(self, _unpin, self._pinned)
        self._unpin.atexit = False

    def tensor(
        self,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """A tensor in the block, contiguous, whose storage ends where it does.

        Args:
            offset: Of its first byte.
            shape: Its shape; empty tensors are not in the block.
            dtype: Its dtype.
        """
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def release(self) -> None:
        """Unpin the memory, and free it once no tensor is in it any more."""
        self._unpin()

    def _pin(self, piece_bytes: int) -> None:
        block = torch.frombuffer(self._memory, dtype=torch.uint8)
        with ThreadPoolExecutor(_TOUCHING_THREADS) as pool:
            for piece in block.split(piece_bytes):
                # Touched memory is pinned faster.
                list(pool.map(Tensor.zero_, piece.split(_TOUCH)))
                start = piece.data_ptr()
                if _call_cuda("cudaHostRegister", start, piece.numel(), 0):
                    self._pinned.append(start)
                else:
                    self.is_pinned = False


def _unpin(addresses: list[int]) -> None:
    if addresses:
        with contextlib.suppress(RuntimeError):  # of an earlier kernel
            torch.cuda.synchronize()  # copies may still run
    for address in addresses:
        _call_cuda("cudaHostUnregister", address)
    addresses.clear()


def _call_cuda(function: str, *args: Any) -> bool:
    """Call a function of the CUDA runtime; returns whether it succeeded."""
    succeeded = int(getattr(torch.cuda.cudart(), function)(*args)) == 0
    if not succeeded:
        # The runtime keeps the error until the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return succeeded
