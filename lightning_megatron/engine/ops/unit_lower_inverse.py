"""Inverse of unit lower triangular matrices, many small ones at once, by forward substitution.

Diagonal blocks are inverted row by row, and then merged in pairs: the inverse of [[A, 0], [C, D]] is [[A', 0],
[-D' C A', D']], with the inverses A' and D'. A series of powers of the matrix would need fewer kernels, but loses all
digits where entries are near 1: those of its powers are binomial coefficients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for

_BLOCK = 16
"""Rows of a diagonal block."""


def unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """Inverse of the identity plus each matrix, [..., n, n], fp32; n is 16 times a power of two.

    Args:
        strictly_lower: [..., n, n], fp32, 0 on and above the diagonal.
    """
    inverse: Tensor = _UnitLowerInverse.apply(strictly_lower)  # type: ignore[no-untyped-call]
    return inverse


class _UnitLowerInverse(torch.autograd.Function):
    """The gradient of X = (1 + L)^-1 is that of X dL X with the sign changed, so it needs X alone."""

    @staticmethod
    def forward(ctx: Any, strictly_lower: Tensor) -> Tensor:
        inverse: Tensor = compiled_for(strictly_lower, _inverse)(strictly_lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        of_product = inverse.mT @ gradients[0] @ inverse.mT
        return -torch.tril(of_product, -1)


def _inverse(strictly_lower: Tensor) -> Tensor:
    size = strictly_lower.shape[-1]
    inverse = _spread(_inverse_of_blocks(strictly_lower))
    rows = torch.arange(size, device=strictly_lower.device)
    width = _BLOCK
    while width < size:
        blocks = rows // width
        is_below = (blocks[:, None] == blocks + 1) & (blocks % 2 == 0)
        below = strictly_lower * is_below
        inverse = inverse - inverse @ below @ inverse
        width *= 2
    return inverse


def _inverse_of_blocks(strictly_lower: Tensor) -> Tensor:
    """Inverses of the diagonal blocks: [..., n / 16, 16, 16]."""
    in_blocks = strictly_lower.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
    blocks = in_blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    identity = torch.eye(_BLOCK, dtype=blocks.dtype, device=blocks.device)
    rows: list[Tensor] = []
    for i in range(_BLOCK):
        row = identity[i].expand(blocks.shape[:-1])
        # Elementwise over columns and matrices, so that a compiler makes one kernel of all rows.
        for j in range(i):
            row = row - blocks[..., i, j, None] * rows[j]
        rows.append(row)
    return torch.stack(rows, dim=-2)


def _spread(blocks: Tensor) -> Tensor:
    """Matrices, [..., n, n], with these diagonal blocks, [..., n / 16, 16, 16], and zeros elsewhere."""
    count = blocks.shape[-3]
    identity = torch.eye(count, dtype=blocks.dtype, device=blocks.device)
    spread = blocks[..., :, :, None, :] * identity[:, None, :, None]
    return spread.flatten(-4, -3).flatten(-2, -1)
