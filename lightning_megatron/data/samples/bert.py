"""Which tokens are sample number i of a BERT: two segments, in order or swapped, with some tokens masked?"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatron.data.samples.base import Objective, Part, Samples
from lightning_megatron.data.samples.masking import MaskingOptions
from lightning_megatron.data.samples.special_tokens import TokenizerFacts


@dataclass(frozen=True, kw_only=True)
class BertObjective(Objective):
    """Masked tokens and, if wanted, the order of two segments, from datasets whose documents are several sentences."""

    seq_length: int
    """Tokens of a row."""
    tokenizer: TokenizerFacts
    """Of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """Which tokens are masked."""
    sentence_order: bool = True
    """Whether rows are two segments, in order (``next_sentence_label`` 0) or swapped (1)."""

    @property
    def name(self) -> str:
        """``bert``."""
        return "bert"

    @property
    def index_key(self) -> str:
        """Of the cuts."""
        raise NotImplementedError

    @property
    def largest_token(self) -> int:
        """The tokenizer's largest: any may take the place of a masked token."""
        return self.tokenizer.size - 1

    def count(self, part: Part) -> int:
        """Samples in one pass."""
        raise NotImplementedError

    def open(self, part: Part, folder: str) -> Samples:
        """The samples of ``part``."""
        raise NotImplementedError
