"""Which tokens of a sample are masked?"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """How much is masked, in pieces of which size."""

    probability: float = 0.15
    """Share of the tokens that is masked; more than 0, less than 1."""
    short_sequence_probability: float = 0.1
    """Share of the samples that are made shorter than the row, at random; drawn as one in a whole number."""
    max_ngram: int | None = None
    """Words that are masked together, at most; None for 3 (BERT) and 10 (T5)."""
    whole_words: bool = True
    """Whether all pieces of a word are masked, or none of them."""
