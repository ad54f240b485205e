"""Host memory for the copy of a run that is being saved."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from lightning_megatron.engine.pinned_memory import PinnedBlock

_ALIGNMENT = 64
"""Alignment of tensors in the block in bytes, enough for any dtype."""
_PINNED_AT_ONCE = 2**30
"""Bytes pinned at once; meanwhile the driver holds locks that training's kernels need, too."""


class HostBuffer:
    """A block of host memory that grows on demand and is then reused.

    It is kept from one save to the next, because on a GPU it is pinned (copies run at the speed of the bus) and pinning
    takes longer than copying: of 112 GB on two H200s 12 of the first save's 13.7 s, which ``preallocate`` avoids. It is
    as large as the largest save so far: one copy of this rank's shards, without those that are used in place.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        """Allocate nothing yet.

        Args:
            in_place: Whether tensors in host memory do not change while the copies are used, so that they need not be
                copied: those of a CPU, and the optimizer's state with ``offload_optimizer``.
        """
        self._in_place = in_place
        self._block: PinnedBlock | None = None
        self._preparing: threading.Thread | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy ``tensors`` into host memory; the copies are complete on return and valid until the next call.

        Every copy has a storage of its own size, so that ``torch.save`` writes no neighbours.
        """
        self._wait()
        copied = self._copied(tensors)
        self._reserve(copied)
        copies = iter(list(map(self._copy_to, copied, _offsets(copied))))
        if any(tensor.is_cuda for tensor in copied):
            torch.cuda.synchronize()
        return [
            _with_own_storage(tensor.detach()) if self._is_used_in_place(tensor) else next(copies)
            for tensor in tensors
        ]

    def _is_used_in_place(self, tensor: torch.Tensor) -> bool:
        return self._in_place and not tensor.is_cuda

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if not self._is_used_in_place(tensor)]

    def _copy_to(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy ``tensor`` to ``offset``; CUDA refuses a copy that reaches from one pinned piece into another."""
        assert self._block is not None, "memory is reserved before it is used"
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = len(data)
        target = self._block.tensor(offset, (size,), torch.uint8)
        cuts = list(range(-offset % _PINNED_AT_ONCE, size, _PINNED_AT_ONCE))
        parts = zip(target.tensor_split(cuts), data.tensor_split(cuts), strict=True)
        for part, source in parts:
            part.copy_(source, non_blocking=True)
        return target.view(tensor.dtype).view(tensor.shape)

    def preallocate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start to allocate memory for copies of ``tensors``, in a thread."""
        self._wait()
        copied = self._copied(tensors)
        self._preparing = threading.Thread(target=self._reserve, args=(copied,), daemon=True)
        self._preparing.start()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def release(self) -> None:
        """Free the memory; copies must not be used any more."""
        self._wait()
        if self._block is not None:
            self._block.release()
        self._block = None

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate memory for ``tensors``, and pin it if any of them is on a GPU."""
        size = _offsets(tensors)[-1]
        if self._block is not None:
            if size <= self._block.num_bytes:
                return
            self._block.release()
            self._block = None  # before the larger block is allocated
        devices = [tensor.device for tensor in tensors if tensor.is_cuda]
        device = devices[0] if devices else torch.device("cpu")
        self._block = PinnedBlock(size, device, pinned_at_once=_PINNED_AT_ONCE)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Offset of each tensor in a block, and last the size of the block."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    return [0, *itertools.accumulate(sizes)]


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one in the same memory if it is a part of a larger storage."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)
