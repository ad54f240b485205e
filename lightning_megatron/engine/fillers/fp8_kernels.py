"""Triton kernels of fp8 linears: the largest magnitude of a tensor, and its fp8 numbers with those of its transpose.

Hopper multiplies fp8 matrices in one layout only (both rows contiguous along what is summed), so a tensor that enters
two products is needed as it is and transposed. One kernel reads it once and writes both; torch would copy three times,
and its copy of a transpose of bytes is slow. Only imported on GPUs: ``fp8.py`` does the same in torch on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_AMAX_BLOCK, _AMAX_ROUNDS = 2048, 16
TILE = (64, 128)
WARPS = 4
"""Fastest of those measured on an H200: [8192, 28672] in bf16 to both in fp8 in 251 us (tiles of 128 x 128 with 8
warps: 315; at the speed of a copy: 220), its amax in 114 (at that speed: 110)."""


# Without annotations: Triton evaluates them.
@triton.jit  # type: ignore[untyped-decorator]
def _amax(x, out, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    largest = tl.zeros([BLOCK], tl.float32)
    for i in range(ROUNDS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)))
    tl.atomic_max(out, tl.max(largest, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _cast(  # type: ignore[no-untyped-def]
    x, amax, scale, rows, columns, m, n, stride, MAX: tl.constexpr, SMALLEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # From the end: what _amax has read last is still in the cache.
    block_m, block_n = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    at_m, at_n = block_m * BM + tl.arange(0, BM), block_n * BN + tl.arange(0, BN)
    there = (at_m[:, None] < m) & (at_n[None, :] < n)
    place = at_m[:, None].to(tl.int64) * n + at_n[None, :]
    largest = tl.maximum(tl.load(amax), SMALLEST)
    # Not clamped: by their scale numbers are in range, and NaN must stay NaN.
    numbers = tl.load(x + place, mask=there, other=0.0).to(tl.float32) * tl.math.div_rn(MAX, largest)
    if ROWS:
        tl.store(rows + place, numbers.to(rows.dtype.element_ty), mask=there)
    if COLUMNS:
        place = at_n[:, None].to(tl.int64) * stride + at_m[None, :]
        there = (at_n[:, None] < n) & (at_m[None, :] < stride)
        tl.store(columns + place, tl.trans(numbers.to(columns.dtype.element_ty)), mask=there)
    if block_m + block_n == 0:
        tl.store(scale, tl.math.div_rn(largest, MAX))


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a contiguous tensor, NaN left out: [1], fp32."""
    out = torch.zeros(1, device=x.device)
    _amax[(triton.cdiv(x.numel(), _AMAX_BLOCK * _AMAX_ROUNDS),)](
        x, out, x.numel(), _AMAX_BLOCK, _AMAX_ROUNDS, num_warps=8
    )
    return out


def cast(x: Tensor, amax: Tensor, smallest: float, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Write ``x`` in fp8, ``amax`` as the largest number of the format; returns the scale, [1], fp32.

    Args:
        x: [m, n], contiguous.
        amax: [1], fp32.
        smallest: Instead of an ``amax`` that is smaller.
        rows: [m, n], fp8; None if it is not needed.
        columns: [n, m or more], fp8: the transpose, then zeros; None if it is not needed.
    """
    (m, n), (tile_m, tile_n) = x.shape, TILE
    written = rows if rows is not None else columns
    assert written is not None
    scale = torch.empty(1, device=x.device)
    stride = m if columns is None else columns.shape[1]
    _cast[(triton.cdiv(n, tile_n), triton.cdiv(stride, tile_m))](
        x, amax, scale, rows, columns, m, n, stride, torch.finfo(written.dtype).max,
        smallest, tile_m, tile_n, rows is not None, columns is not None, num_warps=WARPS,
    )  # fmt: skip
    return scale
