"""How does a piece of the input become token ids, as they are stored?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from lightning_megatron.data.corpus.documents import BadDocument, read_documents
from lightning_megatron.data.corpus.pieces import Piece
from lightning_megatron.data.corpus.tokenizer import batch_encoder
from lightning_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class EncodedKey:
    """One key's documents of one piece."""

    tokens: bytes
    """All ids one after the other, in the dataset's type."""
    lengths: list[int]
    """Tokens of each sequence: of a document, or of a sentence."""
    sequences: list[int] | None
    """Sequences of each document; None if every document is one."""
    num_empty: int
    """Documents without a token: they have no sequence."""


@dataclass(frozen=True, kw_only=True)
class EncodedPiece:
    """What became of one piece."""

    path: str
    """Its file; of several text files, none."""
    num_bytes: int
    """Input bytes that it stands for."""
    keys: list[EncodedKey]
    """Documents that are bad under one key are in none of them."""
    num_documents: int
    """In each key."""
    bad: list[BadDocument]
    """The first ones of those left out."""
    num_bad: int
    """How many were left out."""
    num_units: int
    """Lines or rows in the piece."""


@dataclass(frozen=True, kw_only=True)
class DocumentEncoder:
    """Turns pieces into tokens; processes that tokenize get a copy."""

    tokenizer: Any
    """A transformers tokenizer."""
    keys: Sequence[str]
    """What to encode of each document."""
    dtype: np.dtype[Any]
    """How an id is stored."""
    end_of_document: int | None = None
    """Id after the last token of each document that has one."""
    split: Callable[[str], list[str]] | None = None
    """Makes several sequences of a text; None leaves it whole."""
    stop_at_bad: bool = True
    """Read no further than to the first bad document."""

    def __call__(self, piece: Piece) -> EncodedPiece:
        """The tokens of ``piece``.

        Raises:
            DataError: If the tokenizer gives an id that ``dtype`` cannot hold.
        """
        found = read_documents(piece, self.keys, self.stop_at_bad)
        columns = zip(*found.documents, strict=True) if found.documents else ((),) * len(self.keys)
        return EncodedPiece(
            path=piece.path,
            num_bytes=piece.num_bytes,
            keys=[self._encode_key(texts) for texts in columns],
            num_documents=len(found.documents),
            bad=found.bad,
            num_bad=found.num_bad,
            num_units=found.num_units,
        )

    def _encode_key(self, texts: Sequence[str]) -> EncodedKey:
        groups = [[text] for text in texts] if self.split is None else [self.split(text) for text in texts]
        encoded = iter(batch_encoder(self.tokenizer)(list(chain.from_iterable(groups))))
        sequences: list[list[int]] = []
        counts: list[int] = []
        for group in groups:
            kept = [ids for _, ids in zip(group, encoded, strict=False) if ids]
            if kept and self.end_of_document is not None:
                kept[-1].append(self.end_of_document)
            sequences += kept
            counts.append(len(kept))
        lengths = [len(ids) for ids in sequences]
        return EncodedKey(
            tokens=self._stored(sequences, sum(lengths)),
            lengths=lengths,
            sequences=None if counts.count(1) == len(counts) else counts,
            num_empty=counts.count(0),
        )

    def _stored(self, sequences: list[list[int]], num_tokens: int) -> bytes:
        flat = np.fromiter(chain.from_iterable(sequences), dtype=np.int64, count=num_tokens)
        if num_tokens and flat.max() > np.iinfo(self.dtype).max:
            raise DataError(
                f"the tokenizer gave the id {flat.max()}, beyond its own vocabulary and the {self.dtype.name} that is"
                " stored; its files do not belong together: save it again"
            )
        return flat.astype(self.dtype).tobytes()
