"""Inverse of unit lower triangular matrices, many small ones at once, by products of blocks.

Diagonal blocks are merged in pairs, from single rows on: the inverse of [[A, 0], [C, D]] is [[A', 0], [-D' C A', D']],
with the inverses A' and D'. A series of powers of the matrix would need fewer products, but loses all digits where
entries are near 1: those of its powers are binomial coefficients. A triangular solver has as many steps as there are
rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 16
"""Rows of blocks that are inverted by themselves; larger ones are merged as parts of the whole matrix."""


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
        size = strictly_lower.shape[-1]
        matrices = strictly_lower.reshape(-1, size, size)
        in_blocks = matrices.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
        blocks = in_blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).flatten(0, 1)
        identity = torch.eye(_BLOCK, dtype=blocks.dtype, device=blocks.device)
        # Of pairs of rows the inverse is known: with the sign changed below the diagonal.
        of_blocks = _merged(identity - blocks * _is_below(_BLOCK, 1, blocks.device), blocks, 2)
        of_diagonal = _spread(of_blocks.unflatten(0, (-1, size // _BLOCK)))
        inverse = _merged(of_diagonal, matrices, _BLOCK).view_as(strictly_lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        of_product = inverse.mT @ gradients[0] @ inverse.mT
        return -torch.tril(of_product, -1)


def _merged(inverse: Tensor, matrices: Tensor, width: int) -> Tensor:
    """Inverses of matrices, [m, n, n], of those of their diagonal blocks of ``width`` rows, with zeros elsewhere."""
    size = matrices.shape[-1]
    while width < size:
        below = matrices * _is_below(size, width, matrices.device)
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, below), inverse, alpha=-1)
        width *= 2
    return inverse


def _is_below(size: int, width: int, device: torch.device) -> Tensor:
    """[size, size], bool: the block below the diagonal of each pair of blocks of ``width`` rows."""
    blocks = torch.arange(size, device=device) // width
    is_first = blocks % 2 == 0
    return (blocks[:, None] == blocks + 1) & is_first


def _spread(blocks: Tensor) -> Tensor:
    """Matrices, [m, k * n, k * n], with these diagonal blocks, [m, k, n, n], and zeros elsewhere."""
    identity = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
    spread = blocks[:, :, :, None, :] * identity[:, None, :, None]
    return spread.flatten(3, 4).flatten(1, 2)
