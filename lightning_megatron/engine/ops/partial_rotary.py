"""Rotary embedding of the last dimensions of heads, as in latent attention.

Megatron-Core rotates the first dimensions, in eight kernels, and rounds sines, products and sums. Here a GPU reads and
writes the heads once, in a compiled kernel, and rounds once.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.masks import TensorCache

_TABLES = TensorCache()
"""Tables of cosines and sines, by angles."""

_Table: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of each pair: [s, 1 or b, 1, width / 2] each, fp32."""


def rotate_last(
    heads: Tensor,
    angles: Tensor,
    *,
    factor: float,
    interleaved: bool,
) -> Tensor:
    """Rotate the last dimensions of heads, [s, b, n, hn]; the others stay as they are.

    The rotated pairs are written as two halves, whether they were neighbours or not: queries and keys alike, so that
    scores do not depend on it, as in transformers.

    Args:
        heads: [s, b, n, hn].
        angles: [s, 1 or b, 1, width], fp32 radians: each dimension's, of the ``width`` last dimensions.
        factor: Multiplier of sines and cosines.
        interleaved: Whether rotated pairs are adjacent dimensions, instead of one from each half.
    """

    def make(own: Tensor) -> _Table:
        pairs = own[..., : own.shape[-1] // 2]
        if interleaved:
            pairs = own[..., ::2]
        return pairs.cos() * factor, pairs.sin() * factor

    cosines, sines = _TABLES.get(angles, (factor, interleaved), make)
    rotate = _rotate_halves
    if interleaved:
        rotate = _rotate_neighbours
    # Neither single tokens nor the one head of keys: they are small, and torch compiles a function for few shapes.
    if len(heads) > 1 and heads.shape[2] > 1:
        rotate = compiled_for(heads, rotate)
    rotated: Tensor = rotate(heads, cosines, sines)
    return rotated


def _rotate_neighbours(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = 2 * cosines.shape[-1]
    plain = heads[..., :-width]
    rotary = heads[..., -width:]
    return _joined(plain, rotary[..., ::2], rotary[..., 1::2], (cosines, sines))


def _rotate_halves(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = 2 * cosines.shape[-1]
    plain = heads[..., :-width]
    first, second = heads[..., -width:].chunk(2, dim=-1)
    return _joined(plain, first, second, (cosines, sines))


def _joined(
    plain: Tensor,
    first: Tensor,
    second: Tensor,
    table: _Table,
) -> Tensor:
    """Heads of dimensions that are not rotated, and of pairs that are."""
    cosines, sines = table
    first = first.float()
    second = second.float()
    real = first * cosines - second * sines
    imaginary = second * cosines + first * sines
    rotated = torch.cat((real, imaginary), dim=-1)
    return torch.cat((plain, rotated.to(plain.dtype)), dim=-1)
