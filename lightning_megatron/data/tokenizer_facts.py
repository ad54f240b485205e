"""Facts about a tokenizer that masking needs: its special tokens, and which pieces begin a word.

Tokenizers mark words in one of three ways, recognized from the vocabulary: WordPiece marks the pieces that continue a
word (``##``); SentencePiece (Unigram, BPE) and byte-level BPE mark those that begin one (U+2581, and the letters that
represent the bytes of white space). In scripts without spaces each piece is a word, as it is for WordPiece. If no piece
has a mark, each is a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.tokenizer import largest_id
from lightning_megatron.errors import ConfigError

_CONTINUES = "##"
_SENTENCE_PIECE = "\u2581"
_BYTE_LEVEL = "\u0120"
_WHITE_SPACE_BYTES = tuple(chr(0x100 + byte) for byte in b" \n\r\t\v\f")
_SENTINEL = re.compile(rf"({_SENTENCE_PIECE}?)<extra_id_(\d+)>")
_KNOWN_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos")

_WITHOUT_SPACES = (
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "BOPOMOFO",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
    "TIBETAN",
)
"""First words of the Unicode names of letters in scripts that put no spaces between words."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizerFacts:
    """Facts about a tokenizer that masking needs."""

    source: str
    """Directory of the tokenizer, for messages."""
    special: Mapping[str, int]
    """Ids of ``cls``, ``sep``, ``mask``, ``pad``, ``bos`` and ``eos``, as far as they exist."""
    sentinels: tuple[int, ...] = ()
    """Ids of ``<extra_id_0>``, ``<extra_id_1>``, ..., which stand for masked spans."""
    begins_word: NDArray[np.bool_] = field(repr=False)
    """Whether each id begins a word: [largest id + 1]; special tokens do."""
    ids: NDArray[np.int64] = field(repr=False)
    """All ids in ascending order, any of which may replace a masked token."""

    @classmethod
    def of(cls, tokenizer: Any, source: str) -> TokenizerFacts:
        """Facts of a transformers tokenizer.

        Args:
            tokenizer: A transformers tokenizer, with or without a Rust backend.
            source: Its directory, for messages.
        """
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        largest_id(tokenizer)  # checks it
        entries = list(vocabulary.values())
        ids = np.unique(np.array(entries, dtype=np.int64))
        size = int(ids[-1]) + 1
        begins = np.ones(size, dtype=np.bool_)
        begins[entries] = _begins_word(list(vocabulary))
        begins[[*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]] = True
        sentinels = _sentinels(vocabulary)
        begins[list(sentinels)] = True
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _KNOWN_ROLES}
        special = {role: token for role, token in roles.items() if token is not None}
        return cls(
            source=source,
            special=special,
            sentinels=sentinels,
            begins_word=begins,
            ids=ids,
        )

    @property
    def size(self) -> int:
        """Largest id plus one."""
        return len(self.begins_word)

    @property
    def padding_token(self) -> int:
        """Id that pads rows and is not attended to; 0 if the tokenizer has no padding token."""
        return self.special.get("pad", 0)

    @cached_property
    def maskable(self) -> NDArray[np.bool_]:
        """Whether each id may be masked: [largest id + 1]; the unknown token may, other special tokens may not."""
        maskable = np.ones(self.size, dtype=np.bool_)
        maskable[[*self.special.values(), *self.sentinels]] = False
        return maskable

    def require(
        self,
        roles: Sequence[str],
        user: str,
    ) -> tuple[int, ...]:
        """Ids of the special tokens ``roles``.

        Args:
            roles: Keys of ``special``.
            user: What needs them, for the message.

        Raises:
            ConfigError: If the tokenizer lacks one of them.
        """
        missing = [f"{role}_token" for role in roles if role not in self.special]
        if missing:
            raise ConfigError(
                f"the tokenizer {self.source} has no {', no '.join(missing)}, which {user} needs"
            )
        return tuple(self.special[role] for role in roles)


def _begins_word(pieces: Sequence[str]) -> list[bool]:
    counts = {}
    for mark in (_CONTINUES, _SENTENCE_PIECE, _BYTE_LEVEL):
        counts[mark] = sum(piece.startswith(mark) for piece in pieces)
    # The marks of other tokenizers occur in most large vocabularies, but not at the beginning of many pieces.
    mark = max(counts, key=lambda mark: counts[mark])
    if counts[mark] == 0:
        return [True] * len(pieces)
    if mark == _CONTINUES:
        return [not piece.startswith(_CONTINUES) for piece in pieces]
    if mark == _SENTENCE_PIECE:
        return [piece.startswith(_SENTENCE_PIECE) or _has_no_spaces(piece) for piece in pieces]
    # The bytes E3 to E9 begin kana and ideographs in UTF-8; byte-level BPE represents them by letters of that code.
    return [
        piece.startswith(_WHITE_SPACE_BYTES) or "\u00e3" <= piece[:1] <= "\u00e9"
        for piece in pieces
    ]


def _has_no_spaces(piece: str) -> bool:
    """Whether the first letter belongs to a script without spaces."""
    return piece > "\u0e00" and unicodedata.name(piece[0], "").startswith(_WITHOUT_SPACES)


def _sentinels(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of sentinels in the order of their numbers, which is that of descending ids for T5, of ascending for others.

    The vocabulary of mT5 spells them with SentencePiece's mark. If both spellings exist, the one with the smaller ids
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
