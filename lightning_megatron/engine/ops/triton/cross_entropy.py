"""Cross-entropy over a shard of the vocabulary: a kernel that reads the logits, and one that writes their gradient.

The logits are the largest tensor of a model. torch.compile's kernels for the same two functions stay far from the
memory's rate: H200, bf16, forward + backward in ms, compiled, then these (bandwidth limit): 8,192 x 128,256 1.30 +
1.24, 0.55 + 1.10 (0.49 + 0.98); 16,384 x 151,936 4.36 + 7.73, 1.33 + 2.57 (1.16 + 2.32).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096
"""Columns that a program has in registers, forward."""
_COLUMNS_BACKWARD = 2048
_WARPS = 4


@triton.jit
def _row_statistics(
    logits,
    labels,
    largest,
    total,
    own,
    width,
    first,
    COLUMNS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * width
    # A shard of only padding is all -inf, and -inf - (-inf) is NaN.
    maximum = SMALLEST
    summed = 0.0
    for start in tl.range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        score = tl.load(scores + column, column < width, -float("inf")).to(tl.float32)
        # NaN must stay NaN: it is in the sum.
        new_maximum = tl.maximum(maximum, tl.max(score, 0))
        summed = summed * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(score - new_maximum), 0)
        maximum = new_maximum
    tl.store(largest + row, maximum)
    tl.store(total + row, summed)
    column = tl.load(labels + row) - first
    is_here = (column >= 0) & (column < width)
    tl.store(own + row, tl.load(scores + column, is_here, 0.0).to(tl.float32))


def row_statistics(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same as ``ops/loss.py:row_statistics``, of contiguous logits."""
    logits = logits.contiguous()
    labels = labels.contiguous()
    statistics = torch.empty(3, *labels.shape, dtype=torch.float32, device=logits.device)
    largest, total, own = statistics.unbind()
    _row_statistics[(labels.numel(),)](
        logits,
        labels,
        largest,
        total,
        own,
        logits.shape[-1],
        first,
        COLUMNS=_COLUMNS,
        SMALLEST=torch.finfo(torch.float32).min,
        num_warps=_WARPS,
    )
    return largest, total, own


@triton.jit
def _logits_gradient(
    logits,
    labels,
    log_sum,
    upstream,
    gradient,
    width,
    first,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    score = tl.load(logits + row * width + column, inside, 0.0).to(tl.float32)
    probability = tl.exp(score - tl.load(log_sum + row))
    label = tl.load(labels + row) - first
    result = tl.where(column == label, probability - 1.0, probability) * tl.load(upstream + row)
    tl.store(gradient + row * width + column, result, inside)


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    first: int,
    log_sum: Tensor,
    upstream: Tensor,
) -> Tensor:
    """The same as ``ops/loss.py:logits_gradient``, of contiguous logits."""
    logits = logits.contiguous()
    width = logits.shape[-1]
    gradient = torch.empty_like(logits)
    grid = (labels.numel(), triton.cdiv(width, _COLUMNS_BACKWARD))
    _logits_gradient[grid](
        logits,
        labels.contiguous(),
        log_sum.contiguous(),
        upstream.float().contiguous(),
        gradient,
        width,
        first,
        COLUMNS=_COLUMNS_BACKWARD,
        num_warps=_WARPS,
    )
    return gradient
