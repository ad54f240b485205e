"""Kernels of the rows of experts, of which a buffer may hold fewer than it has room for; only the device knows.

Rows are copied to their positions, each read once however many experts it has, and SwiGLU times a factor is computed of
the rows that exist. Programs of other rows end at once. The outputs of a token's experts are summed in fp32, in a fixed
order, and rounded once; each row is read once and not copied.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.ops.triton.launch_sizes import power_of_two


@triton.jit
def _copy_rows(
    x,
    positions,
    out,
    total,
    width,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    values = tl.load(x + row * width + column, inside)
    for i in tl.static_range(COUNT):
        position = tl.load(positions + row * COUNT + i)
        tl.store(out + position * width + column, values, inside & (position < total))


def copy_rows(x: Tensor, positions: Tensor, total: int) -> Tensor:
    """Copy the rows of ``x``, [n, h], to ``positions``, [n, k], int64, of [total, h]; position ``total`` is nowhere.

    Positions to which no row is copied hold anything.
    """
    x = x.contiguous()
    positions = positions.contiguous()
    out = x.new_empty(total, x.shape[1])
    columns = min(power_of_two(x.shape[1]), 2048)
    if len(x):
        grid = (len(x), triton.cdiv(x.shape[1], columns))
        _copy_rows[grid](
            x,
            positions,
            out,
            total,
            x.shape[1],
            COUNT=positions.shape[1],
            COLUMNS=columns,
        )
    return out


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
    columns = min(power_of_two(x.shape[1]), 1024)
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
def _swiglu(
    rows,
    factors,
    last_end,
    out,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    count = tl.load(last_end)
    first = tl.program_id(0) * ROWS
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    exists = row < count
    factor = tl.load(factors + row, exists, 0.0)[:, None]
    row = row.to(tl.int64)[:, None]
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = exists[:, None] & (column < width)
        gate = tl.load(rows + row * 2 * width + column, inside, 0.0).to(tl.float32)
        up = tl.load(rows + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
        activated = gate * tl.sigmoid(gate) * up * factor
        tl.store(out + row * width + column, activated, inside)


@triton.jit
def _swiglu_backward(
    rows,
    factors,
    last_end,
    d_out,
    d_rows,
    d_factors,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    count = tl.load(last_end)
    first = tl.program_id(0) * ROWS
    if first >= count:
        return
    row = first + tl.arange(0, ROWS)
    exists = row < count
    factor = tl.load(factors + row, exists, 0.0)[:, None]
    d_factor = tl.zeros((ROWS,), tl.float32)
    wide_row = row.to(tl.int64)[:, None]
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = exists[:, None] & (column < width)
        gates = wide_row * 2 * width + column
        ups = gates + width
        gate = tl.load(rows + gates, inside, 0.0).to(tl.float32)
        up = tl.load(rows + ups, inside, 0.0).to(tl.float32)
        gradient = tl.load(d_out + wide_row * width + column, inside, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_factor += tl.sum(silu * up * gradient, axis=1)
        gradient *= factor
        d_gate = gradient * sigmoid * (1 + gate * (1 - sigmoid)) * up
        tl.store(d_rows + gates, d_gate, inside)
        tl.store(d_rows + ups, gradient * silu, inside)
    tl.store(d_factors + row, d_factor, exists)


def _launch(count: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and block sizes for ``count`` rows of ``width`` results."""
    columns = min(power_of_two(width), 1024)
    rows = max(1, ELEMENTS // columns)
    return (triton.cdiv(count, rows),), {"ROWS": rows, "COLUMNS": columns}


ELEMENTS = 2048
"""Results that a program computes at a time."""


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        factors: Tensor,
        last_end: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, factors, last_end)
        out = rows.new_empty(len(rows), rows.shape[1] // 2)
        if len(rows):
            grid, blocks = _launch(*out.shape)
            _swiglu[grid](rows, factors, last_end, out, out.shape[1], **blocks)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, factors, last_end = ctx.saved_tensors
        d_out = upstream[0].contiguous()
        d_rows = torch.empty_like(rows)
        d_factors = torch.empty_like(factors)
        if len(rows):
            grid, blocks = _launch(*d_out.shape)
            _swiglu_backward[grid](
                rows,
                factors,
                last_end,
                d_out,
                d_rows,
                d_factors,
                d_out.shape[1],
                **blocks,
            )
        return d_rows, d_factors, None


def weighted_swiglu(rows: Tensor, factors: Tensor, last_end: Tensor) -> Tensor:
    """SwiGLU times a factor, silu(gate) * up * factor, of the rows before ``last_end``; computed in fp32, rounded once.

    Results and gradients of the others hold anything.

    Args:
        rows: [n, 2 * ffn]: gate, then up.
        factors: [n], fp32.
        last_end: [1], int32, on the device: number of rows that exist.

    Returns:
        [n, ffn].
    """
    activated: Tensor = _WeightedSwiGLU.apply(rows.contiguous(), factors.contiguous(), last_end)
    return activated
