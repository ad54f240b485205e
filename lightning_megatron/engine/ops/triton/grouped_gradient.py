"""Weight gradients of experts, added to their fp32 buffer by the product that computes them.

torch's ``grouped_mm`` writes gradients in bf16, and another kernel reads them and adds them to the buffer: 12 bytes per
parameter and microbatch, and a rounding to bf16. Here a program computes a tile of one expert's gradient in registers
and adds it in the L2 cache (``red``), so that no multiprocessor waits for the buffer: 8 bytes. Each element gets one
addition, so that results are reproducible.

H200, Qwen3-30B-A3B's experts, 131,072 rows, us, ``grouped_mm`` and the addition, then this: fc1 2,193, 1,827; fc2
1,223, 997; with skewed routing 2,615, 1,878 and 1,462, 983. Of 24 variants this is the fastest: TMA loads, additions by
TMA or by loading and storing, other tiles and persistent programs take 3 to 37 % longer.

Where this kernel does not run, ``grouped_mm``'s gradients are added: bf16 to fp32, 302 M elements, 1.2 ms by torch,
0.71 by ``add_to`` (bandwidth limit 0.65).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = (128, 256)
_DEPTH = 64
_WARPS = 8
_STAGES = 4


@triton.jit
def _add_grouped_gradient(
    gradients,
    tokens,
    total,
    ends,
    rows,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    # Programs of one expert follow each other: what they read stays in the L2 cache.
    tiles_n = tl.cdiv(columns, BN)
    tiles = tl.cdiv(rows, BM) * tiles_n
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    at_m = (tile // tiles_n) * BM + tl.arange(0, BM)
    at_n = (tile % tiles_n) * BN + tl.arange(0, BN)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if begin < end:
        at_k = tl.arange(0, BK)
        first = (begin + at_k).to(tl.int64)[:, None]
        gradient = gradients + first * rows + at_m[None, :]
        token = tokens + first * columns + at_n[None, :]
        result = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(begin, end, BK):
            # Rows of the next expert follow, or rows that nobody wrote, which may be NaN.
            exists = (k + at_k < end)[:, None]
            left = tl.load(gradient, exists & (at_m < rows)[None, :], 0.0)
            right = tl.load(token, exists & (at_n < columns)[None, :], 0.0)
            result = tl.dot(left.T, right, result)
            gradient += BK * rows
            token += BK * columns
        to = total + (expert.to(tl.int64) * rows + at_m[:, None]) * columns + at_n[None, :]
        inside = (at_m < rows)[:, None] & (at_n < columns)[None, :]
        tl.atomic_add(to, result, inside, sem="relaxed")


def can_add_grouped_gradient(gradients: Tensor, tokens: Tensor, total: Tensor) -> bool:
    """Whether ``add_grouped_gradient`` takes these tensors, and fast: bf16 products into fp32, on Hopper or newer."""
    tensors = (gradients, tokens, total)
    return (
        gradients.dtype is tokens.dtype is torch.bfloat16
        and total.dtype is torch.float32
        and torch.cuda.get_device_capability(total.device) >= (9, 0)
        and all(x.is_contiguous() for x in tensors)
    )


def add_grouped_gradient(
    gradients: Tensor,
    tokens: Tensor,
    ends: Tensor,
    total: Tensor,
) -> None:
    """Add to each expert's matrix the product of its gradients, transposed, and its tokens; no host synchronization.

    Args:
        gradients: [n, rows], bf16, sorted by expert; rows behind the last expert's may be uninitialized.
        tokens: [n, columns], likewise.
        ends: [experts], int32: end of each expert's rows.
        total: [experts, rows, columns], fp32; that of an expert without tokens is not touched.
    """
    experts, rows, columns = total.shape
    bm, bn = _TILE
    tiles = triton.cdiv(rows, bm) * triton.cdiv(columns, bn)
    _add_grouped_gradient[(experts * tiles,)](
        gradients,
        tokens,
        total,
        ends,
        rows,
        columns,
        BM=bm,
        BN=bn,
        BK=_DEPTH,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


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
