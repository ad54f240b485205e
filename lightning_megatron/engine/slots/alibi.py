"""How much does a head mind distance? Attention with linear biases, as Bloom and as Falcon compute them.

Source: Press et al. 2022, Train Short, Test Long (arXiv 2108.12409), section 3, and its reference code for numbers of
heads that are no power of two.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AlibiKind = Literal["bloom", "falcon"]
"""Bloom adds the bias to the scaled scores; Falcon rounds it to bfloat16 and scales it with the scores."""


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """The biases of one rank's heads."""

    kind: AlibiKind
    """Whose variant."""
    num_heads: int
    """Heads of the whole model: they tell the slopes."""
    first_head: int
    """The first head of this rank; its others follow."""
    num_local_heads: int
    """np/tp."""
    scale: float
    """What the scores are multiplied by; Falcon's biases are, too."""


def slopes(num_heads: int) -> Tensor:
    """What each head subtracts per token of distance: [np], fp32, on the CPU."""
    power = 2 ** math.floor(math.log2(num_heads))

    def series(count: int, exponents: Tensor) -> Tensor:
        return torch.tensor(2.0 ** -(8.0 / count)).pow(exponents)

    first = series(power, torch.arange(1, power + 1, dtype=torch.int32))
    rest = series(2 * power, torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.int32))
    return torch.cat([first, rest])


@functools.lru_cache(maxsize=8)
def _local_slopes(alibi: Alibi, device: torch.device) -> Tensor:
    """[np/tp], fp32, copied to the device once."""
    return slopes(alibi.num_heads)[alibi.first_head :][: alibi.num_local_heads].to(device)


def key_biases(alibi: Alibi, segments: Tensor | None, num_keys: int, device: torch.device) -> Tensor:
    """What each key's position adds to its scores: [b, np/tp, sk] fp32, without a mask [np/tp, sk].

    Positions count the tokens that are no padding. A constant per query changes no softmax, so it does not matter that
    they go on counting in the second document of a row.

    Args:
        alibi: Which heads.
        segments: [b, sk], 0 is padding; None for no mask.
        num_keys: sk.
        device: Where the result shall be.
    """
    if segments is None:
        positions = torch.arange(num_keys, device=device)
    else:
        is_token = (segments != 0).long()
        positions = ((is_token.cumsum(-1) - 1) * is_token)[:, None]
    per_head = _local_slopes(alibi, device)[:, None]
    if alibi.kind == "bloom":
        return per_head * positions
    # As in Hugging Face's Falcon the positions, too, are rounded to bfloat16 before they are multiplied.
    return (per_head.bfloat16() * positions).float() * alibi.scale


@functools.lru_cache(maxsize=8)
def key_biases_without_mask(alibi: Alibi, num_keys: int, device: torch.device) -> Tensor:
    """``key_biases`` of a row without padding, made once: [np/tp, sk], fp32."""
    with torch.inference_mode(False), torch.no_grad():
        return key_biases(alibi, None, num_keys, device)


def relative(biases: Tensor, num_queries: int) -> Tensor:
    """The biases of all pairs, 0 where a token looks at itself: [b or 1, np/tp, sq, sk].

    Near keys get small numbers, which half precision tells apart; the biases of their positions alone are large.

    Args:
        biases: As ``key_biases`` returns them.
        num_queries: sq; the last query stands at the last key.
    """
    pairs = biases[..., None, :] - biases[..., biases.shape[-1] - num_queries :, None]
    return pairs if pairs.dim() == 4 else pairs[None]
