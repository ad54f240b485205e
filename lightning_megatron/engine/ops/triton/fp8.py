"""Cast of a tensor to fp8 together with its transpose, for fp8 linears.

Hopper multiplies fp8 matrices in one layout only (both contiguous along the reduced dimension), so a tensor that
enters two products is needed as it is and transposed. One kernel reads it once and writes both; torch would copy
three times, and its transposing copy of bytes is slow. On a CPU ``ops/fp8.py`` does the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = (64, 128)
_WARPS = 4
"""Fastest of those measured on an H200: [8192, 28672] in bf16 to both layouts in fp8 in 251 us (128 x 128 tiles with 8
warps: 315; at the speed of a copy: 220)."""


@triton.jit
def _fp8_cast(
    x,
    amax,
    scale,
    rows,
    columns,
    m,
    n,
    stride,
    MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # In reverse: the reduction of amax has read the end last, which is still in the cache.
    block_m = tl.num_programs(1) - 1 - tl.program_id(1)
    block_n = tl.num_programs(0) - 1 - tl.program_id(0)
    at_m = block_m * BM + tl.arange(0, BM)
    at_n = block_n * BN + tl.arange(0, BN)
    inside = (at_m[:, None] < m) & (at_n[None, :] < n)
    offset = at_m[:, None].to(tl.int64) * n + at_n[None, :]
    largest = tl.maximum(tl.load(amax), SMALLEST)
    # Not clamped: scaled values are in range, and NaN must stay NaN.
    factor = tl.math.div_rn(MAX, largest)
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * factor
    if ROWS:
        tl.store(rows + offset, values.to(rows.dtype.element_ty), mask=inside)
    if COLUMNS:
        offset = at_n[:, None].to(tl.int64) * stride + at_m[None, :]
        inside = (at_n[:, None] < n) & (at_m[None, :] < stride)
        transposed = tl.trans(values.to(columns.dtype.element_ty))
        tl.store(columns + offset, transposed, mask=inside)
    if block_m + block_n == 0:
        tl.store(scale, tl.math.div_rn(largest, MAX))


def fp8_cast(
    x: Tensor,
    amax: Tensor,
    smallest: float,
    rows: Tensor | None,
    columns: Tensor | None,
) -> Tensor:
    """Cast ``x`` to fp8, with ``amax`` as the largest value of the format; returns the scale, [1], fp32.

    Args:
        x: [m, n], contiguous.
        amax: [1], fp32.
        smallest: Lower bound of ``amax``.
        rows: Output, [m, n], fp8; None if it is not needed.
        columns: Output, [n, m or more], fp8: the transpose, padded with zeros; None if it is not needed.
    """
    m, n = x.shape
    tile_m, tile_n = _TILE
    output = columns if rows is None else rows
    assert output is not None
    scale = torch.empty(1, device=x.device)
    stride = m if columns is None else columns.shape[1]
    grid = (triton.cdiv(n, tile_n), triton.cdiv(stride, tile_m))
    _fp8_cast[grid](
        x,
        amax,
        scale,
        rows,
        columns,
        m,
        n,
        stride,
        torch.finfo(output.dtype).max,
        smallest,
        tile_m,
        tile_n,
        rows is not None,
        columns is not None,
        num_warps=_WARPS,
    )
    return scale
