"""Which tokens are sample number i of a T5: a text whose masked spans are sentinels, and the spans as the answer?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightning_megatron.data.samples.base import Objective, Part, Samples
from lightning_megatron.data.samples.masking import MaskingOptions
from lightning_megatron.data.samples.special_tokens import TokenizerFacts

T5Format: TypeAlias = Literal["hugging_face", "megatron"]


@dataclass(frozen=True, kw_only=True)
class T5Objective(Objective):
    """Span corruption."""

    seq_length: int
    """Tokens of a row of the encoder."""
    seq_length_decoder: int
    """Labels of a row of the decoder."""
    tokenizer: TokenizerFacts
    """Of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """Which tokens are masked."""
    format: T5Format = "hugging_face"
    """``hugging_face``: the text ends with eos, the labels with one more sentinel and eos; ``megatron``: with eos."""

    @property
    def name(self) -> str:
        """``t5``."""
        return "t5"

    @property
    def index_key(self) -> str:
        """Of the cuts."""
        raise NotImplementedError

    @property
    def largest_token(self) -> int:
        """The largest of sentinels, eos and padding."""
        raise NotImplementedError

    def count(self, part: Part) -> int:
        """Samples in one pass."""
        raise NotImplementedError

    def open(self, part: Part, folder: str) -> Samples:
        """The samples of ``part``."""
        raise NotImplementedError
