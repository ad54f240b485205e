"""A residual's addition and the norm that reads the sum in one Triton kernel each way, with bias and dropout.

The sum is written once, read by the norm from registers, and going back one kernel reads the sum and both gradients and
writes what both addends get; the mask of a dropout is drawn again from its seed instead of being kept. The gradients of
the norm's parameters and of the bias are summed in a fixed order.

H200, forward + backward in ms, engine's compiled addition and torch's norm, then this (bytes alone): 8,192 x 4,096
without dropout 0.093 + 0.161, 0.068 + 0.084 (0.063 + 0.063); 12,288 x 1,280 with bias and dropout 0.098 + 0.151,
0.049 + 0.076 (0.029 + 0.037). torch.compile of both: 0.071 + 0.097 for the former, and another graph for each shape.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kept(seed, row, WIDTH: tl.constexpr, DROPPED: tl.constexpr):
    """Which of a row's numbers are kept: [WIDTH], by 32 random bits each."""
    places = row * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
    a, b, c, d = tl.randint4x(tl.load(seed), places.to(tl.uint32), 7)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    return bits >= DROPPED


@triton.jit
def _forward(
    x, bias, residual, weight, shift, seed, total, out, mean, scale, columns, eps, inflation,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    added = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROPPED is not None:
        added = tl.where(_kept(seed, row, WIDTH, DROPPED), added * inflation, 0.0)
    added += tl.load(residual + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row * columns + column, rounded, mask=inside)
    h = rounded.to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        center = tl.sum(h, 0) / columns
        tl.store(mean + row, center)
        h = tl.where(inside, h - center, 0.0)
    inverse = tl.rsqrt(tl.sum(h * h, 0) / columns + eps)
    tl.store(scale + row, inverse)
    h = h * inverse * gain
    if not RMS:
        h += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, h, mask=inside)


@triton.jit
def _backward(
    total, weight, mean, scale, seed, d_total, d_out, d_residual, d_x, partial, rows, columns, inflation,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr, RMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < columns
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([WIDTH], tl.float32)
    d_shift = tl.zeros([WIDTH], tl.float32)
    d_bias = tl.zeros([WIDTH], tl.float32)
    wide = columns.to(tl.int64)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        place = row * wide + column
        h = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        passed = tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        if not RMS:
            h = tl.where(inside, h - tl.load(mean + row), 0.0)
        h *= inverse
        d_weight += upstream * h
        gained = upstream * gain
        change = gained - h * (tl.sum(gained * h, 0) / columns)
        if not RMS:
            d_shift += upstream
            change -= tl.sum(gained, 0) / columns
        change = change * inverse + passed
        tl.store(d_residual + place, change, mask=inside)
        if DROPPED is not None:
            change = tl.where(_kept(seed, row, WIDTH, DROPPED), change * inflation, 0.0)
            tl.store(d_x + place, change, mask=inside)
        if HAS_BIAS:
            d_bias += change
    sums = partial + tl.program_id(0) * columns + column
    size = tl.num_programs(0).to(tl.int64) * columns
    tl.store(sums, d_weight, mask=inside)
    if not RMS:
        tl.store(sums + size, d_shift, mask=inside)
    if HAS_BIAS:
        tl.store(sums + 2 * size, d_bias, mask=inside)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    is_gpu = device.type == "cuda"  # Triton's interpreter runs on the CPU
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, residual: Tensor, weight: Tensor, shift: Any, how: Any) -> Any:
        eps, probability = how
        rows, columns = x.shape[:-1].numel(), x.shape[-1]
        total, out = torch.empty_like(x), torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = scale if shift is None else torch.empty_like(scale)
        seed = torch.randint(2**62, (1,), device=x.device) if probability > 0.0 else scale
        ctx.inflation = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
        width = triton.next_power_of_2(columns)
        dropped = round(probability * (2**32 - 1)) - 2**31 if probability > 0.0 else None
        ctx.flags = {"WIDTH": width, "HAS_BIAS": bias is not None, "DROPPED": dropped, "RMS": shift is None}
        ctx.num_warps = min(max(width // 512, 1), 16)
        _forward[(rows,)](
            x, x if bias is None else bias, residual, weight, weight if shift is None else shift, seed, total, out,
            mean, scale, columns, eps, ctx.inflation, **ctx.flags, num_warps=ctx.num_warps,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, mean, scale, seed)
        return total, out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale, seed = ctx.saved_tensors
        columns, rows = total.shape[-1], len(scale)
        d_total, d_out = (gradient.contiguous() for gradient in upstream)
        d_residual = torch.empty_like(total)
        d_x = d_residual if ctx.flags["DROPPED"] is None else torch.empty_like(total)
        # Each sums the parameters' gradients over its rows. Measured for 1,024, 1,280, 2,048 and 4,096 columns.
        per_multiprocessor, stages = {1: (8, 2), 2: (8, 2), 4: (8, 1)}.get(ctx.num_warps, (2, 1))
        programs = min(per_multiprocessor * _num_multiprocessors(total.device), rows)
        partial = torch.empty(3 if ctx.flags["HAS_BIAS"] else 2, programs, columns, device=total.device)
        _backward[(programs,)](
            total, weight, mean, scale, seed, d_total, d_out, d_residual, d_x, partial, rows, columns, ctx.inflation,
            **ctx.flags, STAGES=stages, num_warps=ctx.num_warps,
        )  # fmt: skip
        d_weight, d_shift, *d_bias = partial.sum(1).to(weight.dtype)
        return d_x, (d_bias or [None])[0], d_residual, d_weight, None if ctx.flags["RMS"] else d_shift, None


def add_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    eps: float,
    probability: float,
) -> tuple[Tensor, Tensor]:
    """``residual + dropout(x + bias)``, and its norm: two tensors of ``x``'s shape and dtype.

    Args:
        x: [..., h].
        bias: [h], a tensor; None for none.
        residual: [..., h] in the dtype of ``x``.
        weight: [h], the norm's.
        shift: [h], LayerNorm's bias; None for RMSNorm.
        eps: The norm's.
        probability: With which a number of ``x + bias`` is dropped; the mask is that of torch's generator on the
            device, which draws one number for it.
    """
    x, residual = x.contiguous(), residual.contiguous()
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x, bias, residual, weight, shift, (eps, probability))
    return both
