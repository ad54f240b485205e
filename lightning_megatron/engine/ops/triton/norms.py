"""Residual addition, with bias and dropout, and the norm that reads the sum: one kernel forward, one backward.

The forward kernel writes the sum once and normalizes it from registers; the backward kernel reads the sum and both
gradients and writes the gradients of both addends. Dropout masks are regenerated from their seed instead of being
saved. Gradients of the norm's parameters and of the bias are summed in a fixed order. A third kernel adds them to the
gradient buffers, where no hook of DDP waits for them: to autograd they would be a sum, a cast and three additions. If
``x`` is the output of an fp8 linear, the norm and the gradient of ``x`` have a known magnitude (``ops/magnitudes.py``).

H200, forward + backward in ms, engine's compiled addition and torch's norm, then this (bandwidth limit): 8,192 x
4,096 without dropout 0.093 + 0.161, 0.068 + 0.084 (0.063 + 0.063); 12,288 x 1,280 with bias and dropout 0.098 +
0.151, 0.049 + 0.076 (0.029 + 0.037). torch.compile of both: 0.071 + 0.097 for the former, and a graph per shape.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.ops import magnitudes
from lightning_megatron.engine.ops.triton.launch_sizes import num_multiprocessors, power_of_two
from lightning_megatron.engine.ops.triton.magnitudes import magnitude_bits, raise_magnitude
from lightning_megatron.engine.ops.weight_gradients import has_hook


@triton.jit
def _dropout_mask(seed, row, WIDTH: tl.constexpr, DROPPED: tl.constexpr):
    """Dropout mask of a row, True for kept elements: [WIDTH], by 32 random bits each."""
    offset = row * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
    a, b, c, d = tl.randint4x(
        tl.load(seed),
        offset.to(tl.uint32),
        7,
    )
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return bits.to(tl.int32, bitcast=True) >= DROPPED


@triton.jit
def _add_norm(
    x,
    bias,
    residual,
    weight,
    shift,
    seed,
    total,
    out,
    mean,
    scale,
    amax,
    columns,
    eps,
    keep_scale,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPPED: tl.constexpr,
    RMS: tl.constexpr,
    AMAX: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    offset = row * columns + column
    added = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROPPED is not None:
        kept = _dropout_mask(seed, row, WIDTH, DROPPED)
        added = tl.where(kept, added * keep_scale, 0.0)
    added += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + offset, rounded, mask=inside)
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
    tl.store(out + offset, h, mask=inside)
    if AMAX:
        raise_magnitude(amax, magnitude_bits(h), out)


@triton.jit
def _add_norm_backward(
    total,
    weight,
    mean,
    scale,
    seed,
    d_total,
    d_out,
    d_residual,
    d_x,
    partial,
    amax,
    rows,
    columns,
    keep_scale,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPPED: tl.constexpr,
    RMS: tl.constexpr,
    AMAX: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    inside = column < columns
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([WIDTH], tl.float32)
    d_shift = tl.zeros([WIDTH], tl.float32)
    d_bias = tl.zeros([WIDTH], tl.float32)
    bits = tl.zeros([WIDTH], tl.int32)
    stride = columns.to(tl.int64)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offset = row * stride + column
        h = tl.load(total + offset, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(d_out + offset, mask=inside, other=0.0).to(tl.float32)
        residual_gradient = tl.load(d_total + offset, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        if not RMS:
            center = tl.load(mean + row)
            h = tl.where(inside, h - center, 0.0)
        h *= inverse
        d_weight += upstream * h
        d_normed = upstream * gain
        gradient = d_normed - h * (tl.sum(d_normed * h, 0) / columns)
        if not RMS:
            d_shift += upstream
            gradient -= tl.sum(d_normed, 0) / columns
        gradient = gradient * inverse + residual_gradient
        tl.store(d_residual + offset, gradient, mask=inside)
        if DROPPED is not None:
            kept = _dropout_mask(seed, row, WIDTH, DROPPED)
            gradient = tl.where(kept, gradient * keep_scale, 0.0)
            tl.store(d_x + offset, gradient, mask=inside)
        if AMAX:
            # A LayerNorm's mean gradient is subtracted behind the last column, too.
            bits = tl.maximum(bits, tl.where(inside, magnitude_bits(gradient), 0))
        if HAS_BIAS:
            d_bias += gradient
    if AMAX:
        raise_magnitude(amax, bits, d_x)
    sums = partial + tl.program_id(0) * columns + column
    size = tl.num_programs(0).to(tl.int64) * columns
    tl.store(sums, d_weight, mask=inside)
    if not RMS:
        tl.store(sums + size, d_shift, mask=inside)
    if HAS_BIAS:
        tl.store(sums + 2 * size, d_bias, mask=inside)


@triton.jit
def _add_sums(
    partial,
    to_weight,
    to_shift,
    to_bias,
    programs,
    columns,
    RMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum ``partial``, [num_sums, programs, columns], over programs, and add the sums to gradients, [columns]."""
    number = tl.program_id(1)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    first = partial + number.to(tl.int64) * programs * columns
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & inside[None, :]
        sums += tl.load(first + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    added = tl.sum(sums, 0)
    if number == 0:
        added += tl.load(to_weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_weight + column, added, mask=inside)
    elif number == 1:
        if not RMS:
            added += tl.load(to_shift + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(to_shift + column, added, mask=inside)
    else:
        added += tl.load(to_bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_bias + column, added, mask=inside)


def add_sums(
    partial: Tensor,
    to_weight: Tensor,
    to_shift: Tensor | None,
    to_bias: Tensor | None,
) -> None:
    """Add the sums of ``partial`` over its second dimension to gradients of a norm, [columns] each, in a fixed order.

    Args:
        partial: [2 or 3, n, columns], fp32: contributions to the gradients of weight, shift and bias.
        to_weight: Gradient of the norm's weight.
        to_shift: Gradient of its bias; None for RMSNorm, whose second row of ``partial`` is undefined.
        to_bias: Gradient of the bias that was added before; None for none.
    """
    num_sums, programs, columns = partial.shape
    # 32 columns are a line of the cache.
    _add_sums[(-(-columns // 32), num_sums)](
        partial,
        to_weight,
        to_weight if to_shift is None else to_shift,
        to_weight if to_bias is None else to_bias,
        programs,
        columns,
        RMS=to_shift is None,
        ROWS=128,
        WIDTH=32,
    )


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Any,
        residual: Tensor,
        weight: Tensor,
        shift: Any,
        options: Any,
    ) -> Any:
        eps, probability, ctx.gradients = options
        columns = x.shape[-1]
        rows = x.shape[:-1].numel()
        total = torch.empty_like(x)
        out = torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = scale if shift is None else torch.empty_like(scale)
        seed = scale  # unused
        dropped = None
        if probability > 0.0:
            seed = torch.randint(2**62, (1,), device=x.device)
            dropped = round(probability * (2**32 - 1)) - 2**31
        ctx.keep_scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
        width = power_of_two(columns)
        ctx.flags = {
            "WIDTH": width,
            "HAS_BIAS": bias is not None,
            "DROPPED": dropped,
            "RMS": shift is None,
            "AMAX": magnitudes.is_marked(x),
        }
        amax = magnitudes.start(x) if ctx.flags["AMAX"] else scale
        ctx.num_warps = min(max(width // 512, 1), 16)
        _add_norm[(rows,)](
            x,
            x if bias is None else bias,
            residual,
            weight,
            weight if shift is None else shift,
            seed,
            total,
            out,
            mean,
            scale,
            amax,
            columns,
            eps,
            ctx.keep_scale,
            **ctx.flags,
            num_warps=ctx.num_warps,
        )
        if ctx.flags["AMAX"]:
            magnitudes.attach(out, amax)
        ctx.save_for_backward(total, weight, mean, scale, seed)
        return total, out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale, seed = ctx.saved_tensors
        columns = total.shape[-1]
        rows = len(scale)
        d_total, d_out = (gradient.contiguous() for gradient in upstream)
        d_residual = torch.empty_like(total)
        d_x = d_residual if ctx.flags["DROPPED"] is None else torch.empty_like(total)
        # Each program sums parameter gradients over its rows. Tuned for 1,024, 1,280, 2,048 and 4,096 columns.
        tuned = {1: (8, 2), 2: (8, 2), 4: (8, 1)}
        per_multiprocessor, stages = tuned.get(ctx.num_warps, (2, 1))
        programs = min(per_multiprocessor * num_multiprocessors(total.device), rows)
        num_sums = 3 if ctx.flags["HAS_BIAS"] else 2
        partial = torch.empty(num_sums, programs, columns, device=total.device)
        amax = magnitudes.start(total) if ctx.flags["AMAX"] else scale
        _add_norm_backward[(programs,)](
            total,
            weight,
            mean,
            scale,
            seed,
            d_total,
            d_out,
            d_residual,
            d_x,
            partial,
            amax,
            rows,
            columns,
            ctx.keep_scale,
            **ctx.flags,
            STAGES=stages,
            num_warps=ctx.num_warps,
        )
        if ctx.flags["AMAX"]:
            magnitudes.attach(d_x, amax)
        if ctx.gradients is not None:
            add_sums(partial, *ctx.gradients)
            return d_x, None, d_residual, None, None, None
        sums = partial.sum(1).to(weight.dtype)
        d_weight = sums[0]
        d_shift = None if ctx.flags["RMS"] else sums[1]
        d_bias = sums[2] if ctx.flags["HAS_BIAS"] else None
        return d_x, d_bias, d_residual, d_weight, d_shift, None


def add_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    eps: float,
    probability: float,
) -> tuple[Tensor, Tensor]:
    """Compute ``residual + dropout(x + bias)`` and its norm: two tensors of ``x``'s shape and dtype.

    Args:
        x: [..., h].
        bias: [h]; None for none.
        residual: [..., h] in the dtype of ``x``.
        weight: [h], weight of the norm.
        shift: [h], bias of a LayerNorm; None for RMSNorm.
        eps: Added to the variance.
        probability: Probability of dropping an element of ``x + bias``; torch's generator on the device draws one
            number as the seed of the mask.
    """
    gradients = _gradient_buffers(x, (weight, shift, bias))
    own_weight, own_shift, own_bias = weight, shift, bias
    if gradients is not None:
        own_weight = weight.detach()
        own_shift = None if shift is None else shift.detach()
        own_bias = None if bias is None else bias.detach()
    outputs: tuple[Tensor, Tensor] = _AddNorm.apply(
        x.contiguous(),
        own_bias,
        residual.contiguous(),
        own_weight,
        own_shift,
        (eps, probability, gradients),
    )
    return outputs


def _gradient_buffers(x: Tensor, parameters: tuple[Any, ...]) -> list[Tensor | None] | None:
    """``main_grad`` of each parameter, None for no parameter; None if autograd needs the gradient of any of them."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return None
    buffers: list[Tensor | None] = []
    for parameter in parameters:
        buffer = None
        if parameter is not None:
            buffer = getattr(parameter, "main_grad", None)
            if buffer is None or has_hook(parameter):
                return None
        buffers.append(buffer)
    return buffers
