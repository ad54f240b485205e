"""Weight gradients of experts, added to their fp32 buffer by the product that computes them.

torch's ``grouped_mm`` writes gradients in bf16, and another kernel reads them and adds them to the buffer: 12 bytes per
parameter and microbatch, and a rounding to bf16. Here a program computes a tile of one expert's gradient in registers
and hands it to the memory unit, which adds it in the L2 cache (a reduction of the tensor memory accelerator), so that
no multiprocessor waits for the buffer: 8 bytes. Each element gets one addition, so that results are reproducible.

FIGURE
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TILE = (128, 128)
_DEPTH = 64
_PARTS = 2
_WARPS = 4
_STAGES = 3
"""Two programs share a multiprocessor, so that one multiplies while the other adds. FIGURE"""


@triton.jit
def _add_tile(
    total,
    tile,
    expert,
    m,
    n,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add ``tile``, [BM, BN], in ``PARTS`` parts of its columns, which need as little shared memory as a part has."""
    if PARTS == 1:
        total.atomic_add([expert, m, n], tile.reshape(1, BM, BN))
    else:
        left, right = tile.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _add_tile(total, left, expert, m, n, BM, BN // 2, PARTS // 2)
        _add_tile(total, right, expert, m, n + BN // 2, BM, BN // 2, PARTS // 2)


@triton.jit
def _add_grouped_gradient(
    gradients,
    tokens,
    all_gradients,
    all_tokens,
    total,
    ends,
    rows,
    columns,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
):
    # Programs of one expert follow each other: what they read stays in the L2 cache.
    tiles_n = tl.cdiv(columns, BN)
    tiles = tl.cdiv(rows, BM) * tiles_n
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m = (tile // tiles_n) * BM
    n = (tile % tiles_n) * BN
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if begin < end:
        result = tl.zeros((BM, BN), tl.float32)
        last = begin + (end - begin) // BK * BK
        for k in tl.range(begin, last, BK):
            result = tl.dot(all_gradients.load([k, m]).T, all_tokens.load([k, n]), result)
        if last < end:
            # Rows of the next expert follow, or rows that nobody wrote, which may be NaN.
            at_k = last + tl.arange(0, BK)
            at_m = m + tl.arange(0, BM)
            at_n = n + tl.arange(0, BN)
            exists = (at_k < end)[:, None]
            offset = at_k.to(tl.int64)[:, None]
            gradient = tl.load(
                gradients + offset * rows + at_m[None, :],
                exists & (at_m < rows)[None, :],
                0.0,
            )
            token = tl.load(
                tokens + offset * columns + at_n[None, :],
                exists & (at_n < columns)[None, :],
                0.0,
            )
            result = tl.dot(gradient.T, token, result)
        _add_tile(total, result, expert, m, n, BM, BN, PARTS)


def can_add_grouped_gradient(gradients: Tensor, tokens: Tensor, total: Tensor) -> bool:
    """Whether ``add_grouped_gradient`` takes these tensors: 16-bit products into fp32, on Hopper or newer."""
    tensors = (gradients, tokens, total)
    return (
        gradients.dtype is tokens.dtype is torch.bfloat16
        and total.dtype is torch.float32
        and torch.cuda.get_device_capability(total.device) >= (9, 0)
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors)
        and gradients.shape[1] % 8 == 0
        and tokens.shape[1] % 8 == 0
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
        TensorDescriptor.from_tensor(gradients, [_DEPTH, bm]),
        TensorDescriptor.from_tensor(tokens, [_DEPTH, bn]),
        TensorDescriptor.from_tensor(total, [1, bm, bn // _PARTS]),
        ends,
        rows,
        columns,
        BM=bm,
        BN=bn,
        BK=_DEPTH,
        PARTS=_PARTS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
