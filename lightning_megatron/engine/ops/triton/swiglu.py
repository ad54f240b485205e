"""SwiGLU with the largest magnitude of what it writes, for fp8: one kernel forward, one backward.

As liger-kernel's it saves the input alone and computes SiLU again in the backward pass. Computed in fp32 and rounded
once. H200, [8192, 2 * 14336] in bf16, forward + backward: FIGURE + FIGURE ms with the magnitude, liger-kernel without
FIGURE + FIGURE and two passes of FIGURE + FIGURE; reading and writing once takes 0.165 + 0.274.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.ops import magnitudes
from lightning_megatron.engine.ops.triton.magnitudes import magnitude_bits, raise_magnitude

_BLOCK = 2048
_WARPS = 8


@triton.jit
def _swiglu(
    x,
    out,
    amax,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gates = x + row * 2 * width
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + width + column, mask=inside, other=0.0).to(tl.float32)
        activated = gate * tl.sigmoid(gate) * up
        tl.store(out + row * width + column, activated, mask=inside)
        bits = tl.maximum(bits, magnitude_bits(activated))
    raise_magnitude(amax, bits, out)


@triton.jit
def _swiglu_backward(
    x,
    d_out,
    d_x,
    amax,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    gates = x + row * 2 * width
    d_gates = d_x + row * 2 * width
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + width + column, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = upstream * up * (sigmoid + silu * (1.0 - sigmoid))
        d_up = upstream * silu
        tl.store(d_gates + column, d_gate, mask=inside)
        tl.store(d_gates + width + column, d_up, mask=inside)
        bits = tl.maximum(bits, tl.maximum(magnitude_bits(d_gate), magnitude_bits(d_up)))
    raise_magnitude(amax, bits, d_x)


def _launch(kernel: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    """Run ``kernel`` on ``tensors``, the last of which it writes, and attach the magnitude of what it wrote."""
    *_, written = tensors
    x = tensors[0]
    width = x.shape[1] // 2
    bits = magnitudes.start(x)
    kernel[(len(x),)](
        *tensors,
        bits,
        width,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=_WARPS,
    )
    magnitudes.attach(written, bits)
    return written


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        return _launch(_swiglu, (x, out))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _launch(_swiglu_backward, (x, upstream[0].contiguous(), torch.empty_like(x)))


def swiglu(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, [tokens, ffn], of gates and ups next to each other, [tokens, 2 * ffn].

    The output and, in the backward pass, the gradient of ``x`` have a known magnitude (``ops/magnitudes.py``).
    """
    activated: Tensor = _SwiGLU.apply(x.contiguous())
    return activated
