"""Triton kernels of experts: sums of a few rows each, and weight gradients added to their buffer.

What the experts of a token made of it is summed in fp32, in a fixed order, and rounded once; each row is read once, and
no copy of them is written. Adding bf16 to fp32, H200, 302 M numbers: 1.2 ms by torch, 0.71 here (bytes alone 0.65).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row_sums(x, places, out, rows, width, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in tl.static_range(PLACES):
        place = tl.load(places + row * PLACES + number)
        total += tl.load(x + place * width + column, inside & (place < rows), 0.0).to(tl.float32)
    tl.store(out + row * width + column, total, inside)


def row_sums(x: Tensor, places: Tensor) -> Tensor:
    """Sums of rows of ``x``, [m, h], at ``places``, [n, k], int64: [n, h]; m stands for no row."""
    x, places = x.contiguous(), places.contiguous()
    out = x.new_empty(len(places), x.shape[1])
    columns = min(triton.next_power_of_2(x.shape[1]), 1024)
    if len(places):
        grid = (len(places), triton.cdiv(x.shape[1], columns))
        _row_sums[grid](x, places, out, len(x), x.shape[1], PLACES=places.shape[1], COLUMNS=columns)
    return out


@triton.jit
def _add(total, x, count, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    inside = place < count
    added = tl.load(total + place, inside).to(tl.float32) + tl.load(x + place, inside).to(tl.float32)
    tl.store(total + place, added, inside)


def add_to(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total``, of the same shape and any dtypes; the sum is of fp32."""
    assert total.is_contiguous(), "a buffer of gradients holds each one in a piece"
    _add[(triton.cdiv(x.numel(), 4096),)](total, x.contiguous(), x.numel(), NUMBERS=4096, num_warps=8)
