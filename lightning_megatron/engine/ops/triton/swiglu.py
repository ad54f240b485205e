"""SwiGLU, between fp8 linears with the largest magnitude of what it writes: one kernel forward, one backward.

It saves the input alone and computes SiLU again in the backward pass, in fp32, and rounds once. H200, [8192, 2 * 14336]
in bf16, forward + backward: 0.171 + 0.285 ms with the magnitude; liger-kernel, a dependency until it was as fast, 0.177
+ 0.277 without, and the magnitudes by two passes 0.079 + 0.147; reading and writing once takes 0.165 + 0.274.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.ops import magnitudes
from lightning_megatron.engine.ops.triton.launch_sizes import power_of_two
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
        if amax is not None:
            bits = tl.maximum(bits, magnitude_bits(activated))
    if amax is not None:
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
        if amax is not None:
            bits = tl.maximum(bits, tl.maximum(magnitude_bits(d_gate), magnitude_bits(d_up)))
    if amax is not None:
        raise_magnitude(amax, bits, d_x)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], *, measures: bool) -> Tensor:
    """Run ``kernel`` on ``tensors``, the last of which it writes; with ``measures`` attach its magnitude."""
    *_, written = tensors
    x = tensors[0]
    width = x.shape[1] // 2
    bits = magnitudes.start(x) if measures else None
    kernel[(len(x),)](
        *tensors,
        bits,
        width,
        BLOCK=min(_BLOCK, power_of_two(width)),
        num_warps=_WARPS,
    )
    if bits is not None:
        magnitudes.attach(written, bits)
    return written


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.measures = magnitudes.is_marked(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        if not len(x):
            return out
        return _launch(_swiglu, (x, out), measures=ctx.measures)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        if not len(x):
            return d_x
        tensors = (x, upstream[0].contiguous(), d_x)
        return _launch(_swiglu_backward, tensors, measures=ctx.measures)


def swiglu(x: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, [tokens, ffn], of gates and ups next to each other, [tokens, 2 * ffn].

    If ``x`` is marked, the output and, in the backward pass, the gradient of ``x`` have a known magnitude
    (``ops/magnitudes.py``).
    """
    activated: Tensor = _SwiGLU.apply(x.contiguous())
    return activated


def use_swiglu_kernel(original: Any) -> type:
    """Replacement of the engine's autograd function, of which only ``apply`` is used."""

    class SwiGLU:
        """SwiGLU of [tokens, 2 * ffn] -> [tokens, ffn]."""

        @staticmethod
        def apply(
            input: Tensor,
            fp8_input_store: bool = False,
            cpu_offload_input: bool = False,
        ) -> Tensor:
            # Both change what the engine saves for backward.
            if fp8_input_store or cpu_offload_input:
                result: Tensor = original.apply(input, fp8_input_store, cpu_offload_input)
                return result
            return swiglu(input)

    return SwiGLU
