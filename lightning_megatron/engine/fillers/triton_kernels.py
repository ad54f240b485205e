"""Triton kernels, imported only where Triton is installed: norms, rotary embedding, Adam, fp8 casts and sums of rows.

Each reads and writes every element once, where torch's operators or compiled graphs pass over memory several times;
measurements are in the comment above each. Kernels have no type annotations, because Triton evaluates them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.fillers.masks import TensorCache

# ---- residual addition and norm --------------------------------------------------------------------------------------
# Residual addition, with bias and dropout, and the norm that reads the sum: one Triton kernel forward, one backward.
#
# The forward kernel writes the sum once and normalizes it from registers; the backward kernel reads the sum and both
# gradients and writes the gradients of both addends. Dropout masks are regenerated from their seed instead of being
# saved. Gradients of the norm's parameters and of the bias are summed in a fixed order.
#
# H200, forward + backward in ms, engine's compiled addition and torch's norm, then this (bandwidth limit): 8,192 x
# 4,096 without dropout 0.093 + 0.161, 0.068 + 0.084 (0.063 + 0.063); 12,288 x 1,280 with bias and dropout 0.098 +
# 0.151, 0.049 + 0.076 (0.029 + 0.037). torch.compile of both: 0.071 + 0.097 for the former, and a graph per shape.


@triton.jit
def _dropout_mask(seed, row, WIDTH: tl.constexpr, DROPPED: tl.constexpr):
    """Dropout mask of a row, True for kept elements: [WIDTH], by 32 random bits each."""
    offset = row * (WIDTH // 4) + tl.arange(0, WIDTH // 4)
    a, b, c, d = tl.randint4x(tl.load(seed), offset.to(tl.uint32), 7)
    bits = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.int32, bitcast=True)
    return bits >= DROPPED


@triton.jit
def _add_norm(
    x, bias, residual, weight, shift, seed, total, out, mean, scale, columns, eps, keep_scale,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < columns
    added = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROPPED is not None:
        added = tl.where(_dropout_mask(seed, row, WIDTH, DROPPED), added * keep_scale, 0.0)
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
def _add_norm_backward(
    total, weight, mean, scale, seed, d_total, d_out, d_residual, d_x, partial, rows, columns, keep_scale,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, DROPPED: tl.constexpr, RMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < columns
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros([WIDTH], tl.float32)
    d_shift = tl.zeros([WIDTH], tl.float32)
    d_bias = tl.zeros([WIDTH], tl.float32)
    stride = columns.to(tl.int64)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offset = row * stride + column
        h = tl.load(total + offset, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(d_out + offset, mask=inside, other=0.0).to(tl.float32)
        residual_gradient = tl.load(d_total + offset, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row)
        if not RMS:
            h = tl.where(inside, h - tl.load(mean + row), 0.0)
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
            gradient = tl.where(
                _dropout_mask(seed, row, WIDTH, DROPPED), gradient * keep_scale, 0.0
            )
            tl.store(d_x + offset, gradient, mask=inside)
        if HAS_BIAS:
            d_bias += gradient
    sums = partial + tl.program_id(0) * columns + column
    size = tl.num_programs(0).to(tl.int64) * columns
    tl.store(sums, d_weight, mask=inside)
    if not RMS:
        tl.store(sums + size, d_shift, mask=inside)
    if HAS_BIAS:
        tl.store(sums + 2 * size, d_bias, mask=inside)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Any, residual: Tensor, weight: Tensor, shift: Any, options: Any
    ) -> Any:
        eps, probability = options
        rows, columns = x.shape[:-1].numel(), x.shape[-1]
        total, out = torch.empty_like(x), torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = scale if shift is None else torch.empty_like(scale)
        seed = torch.randint(2**62, (1,), device=x.device) if probability > 0.0 else scale
        ctx.keep_scale = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
        width = triton.next_power_of_2(columns)
        dropped = round(probability * (2**32 - 1)) - 2**31 if probability > 0.0 else None
        ctx.flags = {
            "WIDTH": width,
            "HAS_BIAS": bias is not None,
            "DROPPED": dropped,
            "RMS": shift is None,
        }
        ctx.num_warps = min(max(width // 512, 1), 16)
        _add_norm[(rows,)](
            x, x if bias is None else bias, residual, weight, weight if shift is None else shift, seed, total, out,
            mean, scale, columns, eps, ctx.keep_scale, **ctx.flags, num_warps=ctx.num_warps,
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
        # Each program sums parameter gradients over its rows. Tuned for 1,024, 1,280, 2,048 and 4,096 columns.
        per_multiprocessor, stages = {1: (8, 2), 2: (8, 2), 4: (8, 1)}.get(ctx.num_warps, (2, 1))
        # Triton's interpreter runs on the CPU.
        count = (
            torch.cuda.get_device_properties(total.device).multi_processor_count
            if total.is_cuda
            else 1
        )
        programs = min(per_multiprocessor * count, rows)
        partial = torch.empty(
            3 if ctx.flags["HAS_BIAS"] else 2, programs, columns, device=total.device
        )
        _add_norm_backward[(programs,)](
            total, weight, mean, scale, seed, d_total, d_out, d_residual, d_x, partial, rows, columns, ctx.keep_scale,
            **ctx.flags, STAGES=stages, num_warps=ctx.num_warps,
        )  # fmt: skip
        d_weight, d_shift, *d_bias = partial.sum(1).to(weight.dtype)
        return (
            d_x,
            (d_bias or [None])[0],
            d_residual,
            d_weight,
            None if ctx.flags["RMS"] else d_shift,
            None,
        )


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
    x, residual = x.contiguous(), residual.contiguous()
    outputs: tuple[Tensor, Tensor] = _AddNorm.apply(
        x, bias, residual, weight, shift, (eps, probability)
    )
    return outputs


# ---- rotary position embedding ---------------------------------------------------------------------------------------
# Rotary embedding in one Triton kernel: from the output of the fused QKV projection to queries, keys and values.
#
# Megatron-Core without Transformer Engine copies the queries out of [s, b, ng * (np/ng + 2) * hn], rotates queries and
# keys by eight kernels each, and concatenates three gradients in the backward pass. torch.compile fused the eight, but
# computed the sine of every element of every head and left the copy and the concatenation. Here each element is read
# and written once in either pass, sines and cosines come from a table that all layers share, and the projection's
# output is not saved. H200, Llama-3-8B, 8192 tokens, forward + backward: 0.180 + 0.207 ms before, now 0.054 + 0.056;
# the bandwidth limit is 0.047 + 0.047.
#
# Computed in float32 and rounded once, where the engine's function rounds sines, products and sums: more exact.

_TABLES = TensorCache()
"""Tables of cosines and sines, by angles."""

_HEADS_PER_PROGRAM = 16


@triton.jit
def _rotate(
    mixed, query, key, value, table, batch, mixed_s, mixed_b, mixed_h, query_s, query_b, query_h, key_s, key_b, key_h,
    value_s, value_b, value_h, table_s, table_b, sine_offset, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotate ``BLOCK_HEADS`` heads of a token; a group's ``GROUP`` heads are ``QUERIES`` queries, a key, a value."""
    s, b = (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    group, member = head // GROUP, head % GROUP
    exists = (head < HEADS) & (pair < HALF)
    is_query, is_key = exists & (member < QUERIES), exists & (member == QUERIES)
    is_value = exists & (member == QUERIES + 1)
    rows = mixed + s * mixed_s + b * mixed_b + head * mixed_h + pair
    queries = query + s * query_s + b * query_b + (group * QUERIES + member) * query_h + pair
    keys = key + s * key_s + b * key_b + group * key_h + pair
    values = value + s * value_s + b * value_b + group * value_h + pair
    cosines = table + s * table_s + b * table_b + pair
    cosine = tl.where(is_value, 1.0, tl.load(cosines, mask=pair < HALF, other=0.0))
    sine = tl.where(is_value, 0.0, tl.load(cosines + sine_offset, mask=pair < HALF, other=0.0))
    if BACKWARD:
        first, second = tl.load(queries, is_query, 0.0), tl.load(queries + HALF, is_query, 0.0)
        first, second = (
            first + tl.load(keys, is_key, 0.0),
            second + tl.load(keys + HALF, is_key, 0.0),
        )
        first, second = (
            first + tl.load(values, is_value, 0.0),
            second + tl.load(values + HALF, is_value, 0.0),
        )
        sine = -sine
    else:
        first, second = tl.load(rows, exists, 0.0), tl.load(rows + HALF, exists, 0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    if BACKWARD:
        tl.store(rows, first, exists)
        tl.store(rows + HALF, second, exists)
    else:
        tl.store(queries, first, is_query)
        tl.store(queries + HALF, second, is_query)
        tl.store(keys, first, is_key)
        tl.store(keys + HALF, second, is_key)
        tl.store(values, first, is_value)
        tl.store(values + HALF, second, is_value)


def _launch_rotate(
    mixed: Tensor, parts: Sequence[Tensor], table: Tensor, queries: int, *, backward: bool
) -> None:
    """Rotate ``mixed`` [s, b, heads, hn] into queries, keys, values, or back; heads without groups are all queries."""
    s, b, heads, _ = mixed.shape
    half = table.shape[-1]
    _rotate[(s * b, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        mixed, *parts, table, b, *mixed.stride()[:3], *(n for part in parts for n in part.stride()[:3]),
        table.stride(1), table.stride(2) if table.shape[2] > 1 else 0, table.stride(0), HEADS=heads, QUERIES=queries,
        GROUP=queries + 2 if queries < heads else heads, HALF=half, PAIRS=triton.next_power_of_2(half),
        BLOCK_HEADS=_HEADS_PER_PROGRAM, BACKWARD=backward,
    )  # fmt: skip


def _cos_sin(angles: Tensor) -> Tensor:
    """Cosines and sines of each pair: [2, s, 1 or b, hn / 2], fp32, of angles [s, 1 or b, 1, hn]."""
    half = angles[:, :, 0, : angles.shape[-1] // 2]
    return torch.stack((half.cos(), half.sin()))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor, queries: int) -> tuple[Tensor, ...]:
        mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
        s, b, heads, width = mixed.shape
        groups = heads // (queries + 2) if queries < heads else 0
        parts = tuple(
            mixed.new_empty(s, b, n, width) for n in (groups * queries or heads, groups, groups)
        )
        ctx.table, ctx.queries, ctx.shape = (
            _TABLES.get(angles, "table", _cos_sin),
            queries,
            mixed.shape,
        )
        _launch_rotate(mixed, parts, ctx.table, queries, backward=False)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = [part if part.stride(-1) == 1 else part.contiguous() for part in gradients]
        mixed = parts[0].new_empty(ctx.shape)
        _launch_rotate(mixed, parts, ctx.table, ctx.queries, backward=True)
        return mixed, None, None


def rotate(t: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads [s, b, n, hn] by ``angles``: [s, 1 or b, 1, hn], fp32 radians, whose halves are equal."""
    rotated: Tensor = _Rotate.apply(t, angles, t.shape[2])[0]
    return rotated


def split_and_rotate(
    mixed: Tensor, query_angles: Tensor, key_angles: Tensor, widths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused QKV projection into rotated queries [s, b, np, hn] and keys, and values, [s, b, ng, hn].

    Signature of Transformer Engine's ``apply_fused_qkv_rotary_pos_emb``.

    Args:
        mixed: [s, b, ng, (np/ng + 2) * hn]: queries, key and value of each group.
        query_angles: [s, 1 or b, 1, hn], fp32 radians, whose halves are equal.
        key_angles: Unused; the same as ``query_angles``.
        widths: Columns of a group's queries, of its key and of its value.
    """
    del key_angles
    heads = mixed.view(*mixed.shape[:2], -1, widths[1])
    split: tuple[Tensor, Tensor, Tensor] = _Rotate.apply(
        heads, query_angles, widths[0] // widths[1]
    )
    return split


def use_rope_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``_apply_rotary_pos_emb_bshd`` by the kernel, for heads that are normalized before the rotation or shared."""

    def _apply_rotary_pos_emb_bshd(t: Tensor, freqs: Tensor, *options: Any, **named: Any) -> Tensor:
        is_standard = not named.get("rotary_interleaved") and not named.get(
            "multi_latent_attention"
        )
        is_unscaled, width = named.get("mscale", 1.0) == 1.0, freqs.shape[-1]
        if options or not (is_standard and is_unscaled and t.is_cuda):
            return original(t, freqs, *options, **named)
        rotated = rotate(t[..., :width], freqs)
        return rotated if width == t.shape[-1] else torch.cat((rotated, t[..., width:]), -1)

    return _apply_rotary_pos_emb_bshd


# ---- Adam ------------------------------------------------------------------------------------------------------------
# Clipping, AdamW or Adam, and the copy into 16-bit weights in one Triton kernel for all tensors of a parameter group.
#
# torch's fused kernel writes clipped gradients back and leaves the copy to another pass. H200, 1.50 G parameters: clip
# 3.37 + torch's step 12.06 + copy 2.57 ms (with grad_scale 14.04 + 2.57), this kernel 11.0 (bandwidth limit 10.5).

_CHUNK = 8192
"""Elements per program."""
_BLOCK = 1024
_TRITON_DTYPES = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _adam(
    table, grad_scale, found_inf, lr, beta1, beta2, eps, decay, correction1, correction2, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, DECOUPLED: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * 6
    scale = 1.0
    if grad_scale is not None:
        scale = 1.0 / tl.load(grad_scale)
    size = tl.load(row + 5).to(tl.int32)
    changed = size
    if found_inf is not None:
        changed = tl.where(tl.load(found_inf) == 0.0, size, 0)
    weights = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    gradients = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    firsts = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    seconds = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), ALIGNMENT)
    lows = tl.load(row + 4)
    for start in tl.static_range(0, CHUNK, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < size
        weight = tl.load(weights + offset, mask=inside)
        gradient = tl.load(gradients + offset, mask=inside) * scale
        if DECOUPLED:
            weight -= lr * decay * weight
        else:
            gradient += decay * weight
        first = beta1 * tl.load(firsts + offset, mask=inside) + (1.0 - beta1) * gradient
        second = (
            beta2 * tl.load(seconds + offset, mask=inside) + (1.0 - beta2) * gradient * gradient
        )
        weight -= lr / correction1 * first / (tl.sqrt(second) / correction2 + eps)
        written = offset < changed  # not the mask of the loads, which would wait for found_inf
        tl.store(weights + offset, weight, mask=written)
        tl.store(firsts + offset, first, mask=written)
        tl.store(seconds + offset, second, mask=written)
        if LOW is not None:
            low = tl.multiple_of(lows.to(tl.pointer_type(LOW)), ALIGNMENT)
            tl.store(low + offset, weight, mask=written & (lows != 0))


AdamKey = tuple[tuple[int, ...], ...]
"""Addresses of weights, gradients, first and second moments (fp32), and 16-bit copies of the weights (0: none)."""


def adam_table(key: AdamKey, sizes: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """Five addresses and the number of elements of each chunk, [chunks, 6] int64; and the alignment of all addresses.

    Args:
        key: Addresses of the tensors.
        sizes: Number of elements of each.
        device: Device of the table.
    """
    counts = -(-torch.tensor(sizes) // _CHUNK)
    tensor = torch.repeat_interleave(counts)
    offset = _CHUNK * (torch.arange(len(tensor)) - (counts.cumsum(0) - counts)[tensor])
    addresses = torch.tensor(key)[:, tensor]
    addresses = torch.where(
        addresses == 0, 0, addresses + offset * torch.tensor([4, 4, 4, 4, 2])[:, None]
    )
    rows = (
        torch.cat((addresses, (torch.tensor(sizes)[tensor] - offset).clamp(max=_CHUNK)[None]))
        .t()
        .contiguous()
    )
    if device.type == "cuda":
        rows = rows.pin_memory()  # so that the copy does not synchronize
    return rows.to(device, non_blocking=True), 4 if (addresses % 16).any() else 16


def adam_step(
    table: tuple[Tensor, int], low: torch.dtype | None, options: dict[str, Any], grad_scale: Tensor | None,
    found_inf: Tensor | None, *, decoupled: bool,
) -> None:  # fmt: skip
    """Update all tensors of a parameter group.

    Args:
        table: Result of ``adam_table``.
        low: Dtype of the 16-bit copies; None if there are none.
        options: The group's ``lr``, ``betas``, ``eps``, ``weight_decay`` and ``step``, which counts this one.
        grad_scale: [] or [1], fp32: divisor of the gradients, which are not overwritten.
        found_inf: [1], fp32: if not 0, nothing is changed.
        decoupled: Whether weight decay is decoupled (AdamW).
    """
    (rows, alignment), (beta1, beta2) = table, options["betas"]
    _adam[(len(rows),)](
        rows, grad_scale, found_inf, options["lr"], beta1, beta2, options["eps"], options["weight_decay"],
        1.0 - beta1 ** options["step"], (1.0 - beta2 ** options["step"]) ** 0.5, CHUNK=_CHUNK, BLOCK=_BLOCK,
        ALIGNMENT=alignment, DECOUPLED=decoupled, LOW=_TRITON_DTYPES[low], num_warps=8,
    )  # fmt: skip


# ---- fp8 -------------------------------------------------------------------------------------------------------------
# Cast of a tensor to fp8 together with its transpose, for fp8 linears.
#
# Hopper multiplies fp8 matrices in one layout only (both contiguous along the reduced dimension), so a tensor that
# enters two products is needed as it is and transposed. One kernel reads it once and writes both; torch would copy
# three times, and its transposing copy of bytes is slow. On a CPU ``fp8.py`` does the same.

_TILE = (64, 128)
_WARPS = 4
"""Fastest of those measured on an H200: [8192, 28672] in bf16 to both layouts in fp8 in 251 us (128 x 128 tiles with 8
warps: 315; at the speed of a copy: 220)."""


@triton.jit
def _fp8_cast(
    x, amax, scale, rows, columns, m, n, stride, MAX: tl.constexpr, SMALLEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # In reverse: the reduction of amax has read the end last, which is still in the cache.
    block_m, block_n = (
        tl.num_programs(1) - 1 - tl.program_id(1),
        tl.num_programs(0) - 1 - tl.program_id(0),
    )
    at_m, at_n = block_m * BM + tl.arange(0, BM), block_n * BN + tl.arange(0, BN)
    inside = (at_m[:, None] < m) & (at_n[None, :] < n)
    offset = at_m[:, None].to(tl.int64) * n + at_n[None, :]
    largest = tl.maximum(tl.load(amax), SMALLEST)
    # Not clamped: scaled values are in range, and NaN must stay NaN.
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * tl.math.div_rn(
        MAX, largest
    )
    if ROWS:
        tl.store(rows + offset, values.to(rows.dtype.element_ty), mask=inside)
    if COLUMNS:
        offset = at_n[:, None].to(tl.int64) * stride + at_m[None, :]
        inside = (at_n[:, None] < n) & (at_m[None, :] < stride)
        tl.store(columns + offset, tl.trans(values.to(columns.dtype.element_ty)), mask=inside)
    if block_m + block_n == 0:
        tl.store(scale, tl.math.div_rn(largest, MAX))


def fp8_cast(
    x: Tensor, amax: Tensor, smallest: float, rows: Tensor | None, columns: Tensor | None
) -> Tensor:
    """Cast ``x`` to fp8, with ``amax`` as the largest value of the format; returns the scale, [1], fp32.

    Args:
        x: [m, n], contiguous.
        amax: [1], fp32.
        smallest: Lower bound of ``amax``.
        rows: Output, [m, n], fp8; None if it is not needed.
        columns: Output, [n, m or more], fp8: the transpose, padded with zeros; None if it is not needed.
    """
    (m, n), (tile_m, tile_n) = x.shape, _TILE
    output = rows if rows is not None else columns
    assert output is not None
    scale = torch.empty(1, device=x.device)
    stride = m if columns is None else columns.shape[1]
    _fp8_cast[(triton.cdiv(n, tile_n), triton.cdiv(stride, tile_m))](
        x, amax, scale, rows, columns, m, n, stride, torch.finfo(output.dtype).max,
        smallest, tile_m, tile_n, rows is not None, columns is not None, num_warps=_WARPS,
    )  # fmt: skip
    return scale


# ---- experts ---------------------------------------------------------------------------------------------------------
# Kernels of experts: sums of a few rows each, and weight gradients added to their buffer.
#
# The outputs of a token's experts are summed in fp32, in a fixed order, and rounded once; each row is read once and not
# copied. Adding bf16 to fp32, H200, 302 M elements: 1.2 ms by torch, 0.71 here (bandwidth limit 0.65).


@triton.jit
def _row_sums(x, positions, out, rows, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(COUNT):
        position = tl.load(positions + row * COUNT + i)
        total += tl.load(x + position * width + column, inside & (position < rows), 0.0).to(
            tl.float32
        )
    tl.store(out + row * width + column, total, inside)


def row_sums(x: Tensor, positions: Tensor) -> Tensor:
    """Sum the rows of ``x``, [m, h], at ``positions``, [n, k], int64: [n, h]; position m stands for no row."""
    x, positions = x.contiguous(), positions.contiguous()
    out = x.new_empty(len(positions), x.shape[1])
    columns = min(triton.next_power_of_2(x.shape[1]), 1024)
    if len(positions):
        grid = (len(positions), triton.cdiv(x.shape[1], columns))
        _row_sums[grid](
            x, positions, out, len(x), x.shape[1], COUNT=positions.shape[1], COLUMNS=columns
        )
    return out


@triton.jit
def _add(total, x, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    added = tl.load(total + offset, inside).to(tl.float32) + tl.load(x + offset, inside).to(
        tl.float32
    )
    tl.store(total + offset, added, inside)


def add_to(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total`` in place, of the same shape and any dtypes; computed in fp32."""
    assert total.is_contiguous(), "expected a contiguous gradient buffer"
    _add[(triton.cdiv(x.numel(), 4096),)](total, x.contiguous(), x.numel(), BLOCK=4096, num_warps=8)
