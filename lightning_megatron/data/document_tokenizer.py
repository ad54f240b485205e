"""Tokenization of documents in the worker processes of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.corpus import RawDocument
from lightning_megatron.data.documents import text_of_file, text_of_line
from lightning_megatron.data.encoding import replace_surrogates
from lightning_megatron.data.tokenizer import batch_encoder
from lightning_megatron.errors import ConfigError


@dataclass(frozen=True)
class TokenizeJob:
    """Consecutive documents of a reader."""

    reader: int
    """Index of the reader."""
    documents: Sequence[RawDocument]


@dataclass(frozen=True)
class TokenizedJob:
    """Tokens of a job's documents; not a tuple, which a DataLoader would convert item by item."""

    reader: int
    """Index of the reader."""
    documents: list[NDArray[np.int32]]
    """Tokens of each document; none for a text without tokens."""


class DocumentTokenizer:
    """Decodes and tokenizes documents; each worker process gets a copy.

    Args:
        tokenizer: As ``load_tokenizer`` returns it.
        key: Key of the text in JSON lines.
        append_eod: Whether to append the end-of-sequence token to each document with tokens.

    Raises:
        ConfigError: If the tokenizer has no such token.
    """

    def __init__(self, tokenizer: Any, key: str, append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._end: list[int] = []
        if append_eod:
            if tokenizer.eos_token_id is None:
                raise ConfigError(
                    f"append_eod=True needs an eos_token, {tokenizer.name_or_path} has none in its "
                    "tokenizer_config.json; add one, or set append_eod=False"
                )
            self._end = [tokenizer.eos_token_id]

    def __call__(self, job: TokenizeJob) -> TokenizedJob:
        """Tokenize the documents of a job.

        Raises:
            DataError: With the location of a document that is not valid.
        """
        texts = [self._text(document) for document in job.documents]
        tokens = []
        encode = batch_encoder(self._tokenizer)
        for ids in encode(texts):
            if ids:
                ids = ids + self._end
            tokens.append(np.array(ids, dtype=np.int32))
        return TokenizedJob(job.reader, tokens)

    def _text(self, document: RawDocument) -> str:
        content = document.content
        if content is None:
            return text_of_file(document.location)
        if isinstance(content, bytes):
            return text_of_line(content, self._key, document.location)
        return replace_surrogates(content)
