"""Largest magnitude of a tensor from the kernel that writes it, for the fp8 linear that quantizes it.

A scale is the largest magnitude of the whole tensor, so quantizing reads a tensor twice. The first of these passes is
left out where the tensor was written by a kernel of ``ops/triton``, which compares what it has in registers anyway:
add + norm, SwiGLU and RoPE, in the pass whose result a linear reads. Attention (cuDNN) and everything else is read
once more.

A linear in fp8 marks its output. The mark means both: the gradient of this tensor will be quantized, and so, in a
transformer layer, will be what is computed from it. Kernels look for the mark on their input, so in bf16, in
generation and in other layers they do as before. The magnitude is an attribute of the tensor that was written; views
(autograd's, and Megatron's reshapes) lead to it by their base. It counts only for exactly these values: autograd
counts in-place changes (``_version``), sums and copies are other tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Known(NamedTuple):
    amax: Tensor
    version: int
    address: int
    size: int
    dtype: torch.dtype


def mark(output: Tensor) -> None:
    """Mark the output of an fp8 linear, or the tensor of which it is a view."""
    for tensor in _with_base(output):
        tensor.is_from_fp8_linear = True


def is_marked(x: Tensor) -> bool:
    """Whether ``x`` is the output of an fp8 linear, or a view of one, and magnitudes can be noted.

    On GPUs Lightning evaluates in inference mode, in which changes are not counted.
    """
    return not torch.is_inference_mode_enabled() and any(
        getattr(tensor, "is_from_fp8_linear", False) for tensor in _with_base(x)
    )


def start(x: Tensor) -> Tensor:
    """Create the magnitude that a kernel raises: 0 as the bits of a float, [1], int32, on the device of ``x``.

    Integers, as an atomic maximum of the bits of non-negative floats is that of the floats, and keeps NaN, which is
    above infinity. A new tensor for each: a pool would not be zeroed by the replay of a CUDA graph.
    """
    return torch.zeros(1, dtype=torch.int32, device=x.device)


def attach(x: Tensor, bits: Tensor) -> None:
    """Note that the kernel that wrote the contiguous ``x`` raised ``bits``, of ``start``, by its magnitudes."""
    known = _Known(bits.view(torch.float32), x._version, x.data_ptr(), x.numel(), x.dtype)
    x.known_magnitude = known  # type: ignore[attr-defined]


def largest_magnitude(x: Tensor) -> Tensor:
    """Largest magnitude of the contiguous ``x``, [1], fp32, NaN if an element is; not to be changed in place."""
    for tensor in _with_base(x):
        known = getattr(tensor, "known_magnitude", None)
        if known is None:
            continue
        now = (x._version, x.data_ptr(), x.numel(), x.dtype)
        if known[1:] == now:
            amax: Tensor = known.amax
            return amax
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return largest.reshape(1)


def _with_base(x: Tensor) -> Iterator[Any]:
    """Yield ``x`` and, if it is a view, the tensor that it shows."""
    yield x
    if x._base is not None:
        yield x._base
