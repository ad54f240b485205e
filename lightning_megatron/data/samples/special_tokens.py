"""Which ids of a tokenizer are special, and which pieces begin a word?

A tokenizer marks words in one of three ways, seen from its vocabulary: WordPiece marks the pieces that continue a word
(``##``), SentencePiece (Unigram, BPE) and byte-level BPE mark those that begin one (U+2581; the letters that stand for
the bytes of white space). Where pieces have no marks each is a word.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.corpus.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError

_CONTINUES = "##"
_SENTENCE_PIECE = "\u2581"
_WHITE_SPACE_BYTES = tuple(chr(0x100 + byte) for byte in b" \n\r\t\v\f")
_SENTINEL = re.compile(rf"({_SENTENCE_PIECE}?)<extra_id_(\d+)>")

_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""First words of the Unicode names of letters whose scripts put no spaces between words."""

_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos")


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What masking needs to know of a tokenizer; an id is None if the tokenizer has no such token."""

    source: str
    """The tokenizer's folder, for messages."""
    cls: int | None = None
    """Begins a row of a BERT."""
    sep: int | None = None
    """Ends a segment of a BERT."""
    mask: int | None = None
    """Stands for a masked token."""
    pad: int | None = None
    """Fills rows up."""
    bos: int | None = None
    """Begins a document."""
    eos: int | None = None
    """Ends a document."""
    sentinels: tuple[int, ...] = ()
    """``<extra_id_0>``, ``<extra_id_1>``, ...: stand for masked spans."""
    begins_word: NDArray[np.bool_] = field(repr=False, compare=False)
    """Whether an id begins a word: [largest id + 1]; special tokens do."""
    ids: NDArray[np.int64] = field(repr=False, compare=False)
    """All ids in ascending order: one of them takes the place of a masked token now and then."""

    @classmethod
    def read(cls, folder: str | Path) -> TokenizerFacts:
        """The facts of the transformers tokenizer in ``folder``.

        Raises:
            DataError: If there is no tokenizer in ``folder``.
        """
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The largest id and one."""
        return len(self.begins_word)
