"""Which keys does a query see? Segments, causality and windows, as one dense mask that all layers share.

A mask is an integer tensor [b, sk] of segment numbers: 0 is padding, tokens of one segment see each other, and nothing
else. Hugging Face's 0/1 padding masks are such tensors; the documents of a packed row are 1, 2, 3 and so on. A token of
padding sees itself alone: some kernels turn a row that sees nothing into NaN, and what it sees is computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MASKED_SCORE = -10000.0
"""Added to a masked score, as in Megatron (transformer/utils.py:attention_mask_func).

Finite, because BERT masks every key of a padded query, and a softmax over nothing but -inf is NaN in some kernels;
large enough that exp() of it is exactly 0 beside any real score; small enough for float16.
"""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What is hidden whatever the tokens are. The last query stands at the last key: earlier keys may be cached."""

    num_queries: int
    """sq."""
    num_keys: int
    """sk."""
    causal: bool
    """Whether a query sees no later key."""
    window: int | None = None
    """How many keys back a query sees, its own included; None for all."""
    cross: bool = False
    """Whether queries are of another sequence than the keys, so that segments only tell which keys are padding."""

    @property
    def hides(self) -> bool:
        """Whether any key is hidden from any query."""
        return self.causal or self.window is not None

    @property
    def first_query(self) -> int:
        """The key position at which the first query stands."""
        return self.num_keys - self.num_queries


def pattern_of(num_queries: int, num_keys: int, *, causal: bool, window: int | None, cross: bool) -> Pattern:
    """The pattern in its simplest form: what hides nothing is left out, so that it needs no mask."""
    return Pattern(
        num_queries=num_queries,
        num_keys=num_keys,
        causal=causal and num_queries > 1,
        window=None if window is None or num_keys <= window else window,
        cross=cross,
    )


def sides(segments: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Numbers of the queries [b, sq] and of the keys [b, sk], int32, which are equal where a query sees a key."""
    if pattern.cross:
        keys = (segments != 0).int()
        return keys.new_ones(keys.shape[0], pattern.num_queries), keys
    keys = segments.int()
    alone = torch.arange(-1, -1 - pattern.num_keys, -1, dtype=torch.int32, device=keys.device)
    keys = torch.where(keys == 0, alone, keys)
    return keys[:, pattern.first_query :], keys


def hidden_keys(segments: Tensor | None, pattern: Pattern, device: torch.device) -> Tensor | None:
    """True where a key must not be seen: bool [b or 1, 1, sq or 1, sk]; None if all may be seen."""
    hidden = None
    if pattern.hides:
        distance = torch.arange(pattern.num_queries, device=device)[:, None] + pattern.first_query
        distance = distance - torch.arange(pattern.num_keys, device=device)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if pattern.causal:
            hidden |= distance < 0
        if pattern.window is not None:
            hidden |= distance >= pattern.window
        hidden = hidden[None, None]
    if segments is None:
        return hidden
    if pattern.cross:
        others = (segments == 0)[:, None, None, :]
    else:
        queries, keys = sides(segments, pattern)
        others = (queries[:, :, None] != keys[:, None, :])[:, None]
    return others if hidden is None else others | hidden


def added_scores(hidden: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bias plus MASKED_SCORE where a key must not be seen, [b or 1, np or 1, sq or 1, sk]."""
    if hidden is None:
        assert bias is not None, "without mask and bias the caller needs no scores"
        return bias.to(dtype)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, MASKED_SCORE)
    # Overwritten, not added: the sum of a large bias and MASKED_SCORE could be seen again, or overflow in float16.
    return bias.to(dtype).masked_fill(hidden, MASKED_SCORE)


class PerMask:
    """What is made from a mask once, for all layers, and forgotten when the mask is."""

    def __init__(self) -> None:
        """Start empty."""
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        """How many masks are remembered."""
        return len(self._made)

    def get(self, mask: Tensor, name: Hashable, make: Callable[[Tensor], _T]) -> _T:
        """What ``make`` returned for ``mask`` under ``name``.

        Args:
            mask: Remembered weakly, by its memory: recomputation passes another tensor object with the same memory.
            name: Tells apart what is made from one mask.
            make: Gets a tensor equal to ``mask``; what it returns may refer to that without keeping ``mask`` alive.
        """
        made = self._of(mask)
        # A mask that was written to is another one. Tensors of inference mode are not counted, and live shortly.
        key = (name, None if mask.is_inference() else mask._version)
        if key not in made:
            # What is made while validating may be used in training, where inference tensors cannot be saved.
            with torch.inference_mode(False), torch.no_grad():
                made[key] = make(mask.detach())
        value: _T = made[key]
        return value

    def _of(self, mask: Tensor) -> dict[Any, Any]:
        if mask not in self._made:
            for other, made in self._made.items():
                if _same_memory(mask, other):
                    found: dict[Any, Any] = made
                    return found
            self._made[mask] = {}
        own: dict[Any, Any] = self._made[mask]
        return own


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two living tensors are views of the same numbers."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
        and a.is_inference() == b.is_inference()
    )
