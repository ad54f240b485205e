"""Special tokens of a tokenizer, and which of its pieces begin a word.

A tokenizer marks words in one of three ways, seen from its vocabulary: WordPiece marks the pieces that continue a word
(``##``); SentencePiece (Unigram, BPE) and byte-level BPE mark those that begin one (U+2581, and the letters that stand
for the bytes of white space). In scripts without spaces each piece is a word, as it is for WordPiece. Where no piece
has a mark each is a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import ConfigError

_CONTINUES = "##"
_SENTENCE_PIECE = "\u2581"
_BYTE_LEVEL = "\u0120"
_WHITE_SPACE_BYTES = tuple(chr(0x100 + byte) for byte in b" \n\r\t\v\f")
_SENTINEL = re.compile(rf"({_SENTENCE_PIECE}?)<extra_id_(\d+)>")
_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos")

_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""First words of the Unicode names of letters whose scripts put no spaces between words."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
    begins_word: NDArray[np.bool_] = field(repr=False)
    """Whether an id begins a word: [largest id + 1]; special tokens do."""
    ids: NDArray[np.int64] = field(repr=False)
    """All ids in ascending order: any of them may take the place of a masked token."""

    @classmethod
    def read(cls, folder: str | Path) -> TokenizerFacts:
        """The facts of the transformers tokenizer in ``folder``.

        Raises:
            DataError: If there is no tokenizer in ``folder``.
        """
        from lightning_megatron.data.tokenizer import load_tokenizer

        return cls.of(load_tokenizer(folder), str(folder))

    @classmethod
    def of(cls, tokenizer: Any, source: str) -> TokenizerFacts:
        """The facts of a transformers tokenizer.

        Args:
            tokenizer: With or without a Rust backend.
            source: How messages call it.
        """
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        ids = np.unique(np.fromiter(vocabulary.values(), np.int64, len(vocabulary)))
        begins = np.ones(int(ids[-1]) + 1, dtype=np.bool_)
        pieces = list(vocabulary)
        begins[[vocabulary[piece] for piece in pieces]] = _begins_word(pieces)
        begins[[*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]] = True
        sentinels = _sentinels(vocabulary)
        begins[list(sentinels)] = True
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
        return cls(source=source, sentinels=sentinels, begins_word=begins, ids=ids, **roles)

    @property
    def size(self) -> int:
        """The largest id and one."""
        return len(self.begins_word)

    @property
    def fill(self) -> int:
        """The id behind the end of a row, where nothing is attended to: padding, or any if there is none."""
        return 0 if self.pad is None else self.pad

    @property
    def maskable(self) -> NDArray[np.bool_]:
        """Whether an id may be masked: [largest id + 1]; unknown words may, other special tokens may not."""
        maskable = np.ones(self.size, dtype=np.bool_)
        roles = [getattr(self, role) for role in _ROLES]
        maskable[[*(token for token in roles if token is not None), *self.sentinels]] = False
        return maskable

    def require(self, roles: Sequence[str], user: str) -> tuple[int, ...]:
        """The ids of ``roles``.

        Args:
            roles: Of ``cls``, ``sep``, ``mask``, ``pad``, ``bos``, ``eos``.
            user: Who needs them.

        Raises:
            ConfigError: If the tokenizer lacks one of them.
        """
        missing = [f"{role}_token" for role in roles if getattr(self, role) is None]
        if missing:
            raise ConfigError(
                f"the tokenizer {self.source} has no {', no '.join(missing)}, which {user} needs; use the tokenizer of"
                f" a {user} model, or give it these with tokenizer.add_special_tokens and save it"
            )
        return tuple(getattr(self, role) for role in roles)


def _begins_word(pieces: Sequence[str]) -> list[bool]:
    marks = {
        mark: sum(piece.startswith(mark) for piece in pieces) for mark in (_CONTINUES, _SENTENCE_PIECE, _BYTE_LEVEL)
    }
    # A letter that is a mark elsewhere occurs in most large vocabularies, but not at the head of many pieces.
    mark = max(marks, key=lambda mark: marks[mark])
    if marks[mark] == 0:
        return [True] * len(pieces)
    if mark == _CONTINUES:
        return [not piece.startswith(_CONTINUES) for piece in pieces]
    if mark == _SENTENCE_PIECE:
        return [piece.startswith(_SENTENCE_PIECE) or _has_no_spaces(piece) for piece in pieces]
    # The bytes E3 to E9 begin the kana and the ideographs in UTF-8, and are letters of their own in a byte-level BPE.
    return [piece.startswith(_WHITE_SPACE_BYTES) or "\u00e3" <= piece[:1] <= "\u00e9" for piece in pieces]


def _has_no_spaces(piece: str) -> bool:
    """Whether the first letter is of a script without spaces."""
    return piece > "\u0e00" and unicodedata.name(piece[0], "").startswith(_WITHOUT_SPACES)


def _sentinels(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """In the order of their numbers, which is that of falling ids for T5 and of rising ids for others.

    The vocabulary of mT5 has them with SentencePiece's mark. Where both spellings exist, the one with the smaller ids
    was there when the model was trained.
    """
    spellings: dict[str, dict[int, int]] = {}
    for piece, token in vocabulary.items():
        if match := _SENTINEL.fullmatch(piece):
            spellings.setdefault(match[1], {})[int(match[2])] = token
    if not spellings:
        return ()
    numbered = min(spellings.values(), key=lambda spelling: min(spelling.values()))
    return tuple(numbered[number] for number in sorted(numbered))
