"""Kernels of experts: sums of a few rows each, and weight gradients added to their buffer.

The outputs of a token's experts are summed in fp32, in a fixed order, and rounded once; each row is read once and not
copied. Adding bf16 to fp32, H200, 302 M elements: 1.2 ms by torch, 0.71 here (bandwidth limit 0.65).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row_sums(
    x,
    positions,
    out,
    rows,
    width,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(COUNT):
        position = tl.load(positions + row * COUNT + i)
        exists = inside & (position < rows)
        total += tl.load(x + position * width + column, exists, 0.0).to(tl.float32)
    tl.store(out + row * width + column, total, inside)


def row_sums(x: Tensor, positions: Tensor) -> Tensor:
    """Sum the rows of ``x``, [m, h], at ``positions``, [n, k], int64: [n, h]; position m stands for no row."""
    x = x.contiguous()
    positions = positions.contiguous()
    out = x.new_empty(len(positions), x.shape[1])
    columns = min(triton.next_power_of_2(x.shape[1]), 1024)
    if len(positions):
        grid = (len(positions), triton.cdiv(x.shape[1], columns))
        _row_sums[grid](
            x,
            positions,
            out,
            len(x),
            x.shape[1],
            COUNT=positions.shape[1],
            COLUMNS=columns,
        )
    return out


@triton.jit
def _add(total, x, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    added = tl.load(total + offset, inside).to(tl.float32)
    added += tl.load(x + offset, inside).to(tl.float32)
    tl.store(total + offset, added, inside)


def add_to(total: Tensor, x: Tensor) -> None:
    """Add ``x`` to ``total`` in place, of the same shape and any dtypes; computed in fp32."""
    assert total.is_contiguous(), "expected a contiguous gradient buffer"
    _add[(triton.cdiv(x.numel(), 4096),)](
        total,
        x.contiguous(),
        x.numel(),
        BLOCK=4096,
        num_warps=8,
    )
