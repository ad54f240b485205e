"""Tokenize a corpus into indexed datasets: documents in parallel, written in input order (``preprocess``).

Workers are those of ``torch.utils.data.DataLoader``, which keeps the order, bounds the pieces in flight and learns of
killed workers by a signal. ``concurrent.futures.ProcessPoolExecutor`` waits forever for the rest of a message that a
killed worker has left half-written (24 of 120 such runs hung).

Sentences are split by sentencex (MIT licence), which ships its rules and lists of abbreviations: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import numpy as np

from lightning_megatron.data.documents import (
    BadDocuments,
    check_encoding,
    cut_into_pieces,
    read_documents,
)
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.indexed import token_dtype
from lightning_megatron.data.indexed_writer import dataset_writers
from lightning_megatron.data.input_files import (
    PLAIN_TEXT_KEY,
    find_files,
    input_progress,
    require_library,
)
from lightning_megatron.data.pieces import Piece
from lightning_megatron.data.tokenizer import (
    batch_encoder,
    largest_id,
    load_tokenizer,
    warn_of_missing_beginning,
)
from lightning_megatron.errors import MOST_PROCESSES, ConfigError, DataError, require_number

PREFETCH_FACTOR = 4
"""Pieces in flight per worker: so many that a slow one does not stall the others, so few that memory stays constant."""

# sentencex 1.0.32 panics at multi-byte white space between an initial and a period, and never at plain spaces.
_WIDE_SPACE = re.compile("[\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Settings of ``preprocess``."""

    input: Sequence[str | Path]
    """Files, directories (searched recursively, without links to directories) and quoted patterns: .jsonl (one JSON
    object per line), .parquet, and text files of one document each; JSON lines and text also as .gz and .zst."""
    output_prefix: str | Path
    """Beginning of the paths of written files, none of which may exist; the key of text files is ``text``."""
    tokenizer: str | Path
    """Directory of a transformers tokenizer, or its name on the Hugging Face hub. Texts get none of the special tokens
    that it adds by default, such as a beginning of sequence; those that are written in a text are tokens."""
    json_keys: Sequence[str] = (PLAIN_TEXT_KEY,)
    """Keys of the JSON objects, or columns, to tokenize; each becomes a dataset, and document i is the same in all of
    them: a text without tokens becomes a document without sequences, as in Megatron's datasets."""
    append_eod: bool = False
    """End every document that has a token with the tokenizer's end-of-sequence token."""
    split_sentences: bool = False
    """Store each sentence as a sequence of its document, as BERT and T5 samples need it."""
    language: str = "en"
    """Language of the sentences: en, de, ja, ... (ISO 639)."""
    keep_newlines: bool = False
    """Keep the white space between two sentences at the end of the first; otherwise it is dropped."""
    workers: int = 1
    """Tokenizing processes, of one core each; the output does not depend on their number."""
    on_error: Literal["skip", "fail"] = "fail"
    """End at the first line, row or file that is not a valid document, or report it, skip it and count it."""
    encoding: str = "utf-8"
    """Encoding of text files and JSON lines in Python's names: utf-8, latin-1, cp1252; utf-16 for text files only."""
    errors: Literal["strict", "replace"] = "strict"
    """What is done with bytes that are not of that encoding: ``strict`` treats the document as bad (see on_error), with
    the first such byte; ``replace`` makes them U+FFFD and counts them."""
    max_document_bytes: int | None = None
    """Refuse longer documents. By default a plain file may hold one of its own size; a compressed one or a table one of
    20 times its size, at least 1 MiB and at most 1 GiB, as a few kilobytes can decompress to gigabytes."""

    def __post_init__(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigError: If a value cannot work.
        """
        require_number("workers", self.workers, at_least=1, at_most=MOST_PROCESSES)
        if self.max_document_bytes is not None:
            require_number("max_document_bytes", self.max_document_bytes, at_least=1)
        TextEncoding(name=self.encoding, errors=self.errors)
        keys = self.json_keys
        has_slash = any(os.sep in key for key in keys)  # they name files
        if not keys or len(set(keys)) != len(keys) or has_slash:
            raise ConfigError(
                f"json_keys={' '.join(keys)!r}: expected keys, each once, without a slash; correct them"
            )
        if self.keep_newlines and not self.split_sentences:
            raise ConfigError(
                "keep_newlines needs split_sentences: unsplit documents keep newlines; leave it out"
            )
        # The library treats unknown languages like English.
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise ConfigError(
                f"language={self.language}: expected an ISO 639 code like en, de or ja"
            )
        if self.split_sentences:
            require_library("sentencex", "split_sentences")


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """Result of ``preprocess``."""

    prefixes: tuple[str, ...]
    """Written datasets, one per key: values for ``IndexedDataModule(data_path=...)``."""
    documents: int
    """Documents in each dataset, empty ones included."""
    empty_documents: int
    """Texts without tokens, over all keys."""
    skipped: int
    """Lines, rows and files skipped because they are not valid documents."""
    replaced: int
    """Characters that were not of the encoding, and became U+FFFD."""
    tokens: int
    """Tokens in all datasets."""
    bytes: int
    """Bytes of input as stored on disk."""
    seconds: float
    """Wall time from the first byte read to the last one written, without loading the tokenizer."""


def preprocess(options: PreprocessOptions) -> PreprocessResult:
    """Tokenize the inputs into one indexed dataset per key; the files appear when all of them are complete.

    Raises:
        DataError: If an input or the tokenizer is missing, unreadable or malformed, or no document has a token.
        ConfigError: If the tokenizer or the installation lacks what the options need.
    """
    files = find_files(options.input, options.json_keys)
    check_encoding(files, TextEncoding(name=options.encoding, errors=options.errors))
    encoder = DocumentEncoder(options)
    level = "sentence" if options.split_sentences else "document"
    endings = [f"_{key}_{level}" for key in options.json_keys]
    began = time.perf_counter()
    tokens = 0
    replaced = 0
    cut = cut_into_pieces(files, options.json_keys, max_document_bytes=options.max_document_bytes)
    pieces = _encode_all(cut, encoder, options.workers)
    with (
        dataset_writers(options.output_prefix, encoder.dtype, endings) as writers,
        contextlib.closing(pieces),
        input_progress(files, "Tokenizing") as bar,
    ):
        bad = BadDocuments(options.on_error, bar)
        for piece in pieces:
            bad.add(piece.bad)
            replaced += piece.replaced
            for writer, part in zip(writers, piece.keys, strict=True):
                writer.add_documents(*part)
            tokens = sum(writer.num_tokens for writer in writers)
            bar.set_postfix(docs=f"{len(writers[0].counts):,}", tokens=f"{tokens:,}", refresh=False)
            bar.update(piece.num_bytes)
        for key, writer in zip(options.json_keys, writers, strict=True):
            if not writer.num_tokens:
                problem = f"no document has a token under '{key}' in {len(files)} files"
                if bad.count:
                    problem += f" ({bad.count} lines, rows or files were skipped)"
                raise DataError(f"{problem}; give others")
    return PreprocessResult(
        prefixes=tuple(f"{options.output_prefix}{ending}" for ending in endings),
        documents=len(writers[0].counts),
        empty_documents=sum(writer.counts.count(0) for writer in writers),
        skipped=bad.count,
        replaced=replaced,
        tokens=tokens,
        bytes=bar.total,
        seconds=time.perf_counter() - began,
    )


EncodedKey: TypeAlias = tuple[bytes, list[int], list[int]]
"""Documents of a piece under one key, as the writer takes them: all ids concatenated, in the dataset's dtype; tokens of
each sequence (a document or a sentence); and sequences of each document, 0 for one without tokens."""


@dataclass(frozen=True)
class EncodedPiece:
    """Tokenized piece; not a tuple, which the DataLoader would convert item by item."""

    bad: list[str]
    """Messages about bad documents."""
    num_bytes: int
    """Bytes of input as stored on disk."""
    keys: list[EncodedKey]
    """Documents under each key; those that are bad under one key are left out of all."""
    replaced: int
    """Characters that were not of the encoding, and became U+FFFD."""


class DocumentEncoder:
    """Tokenizes pieces to ids as they are stored; each worker process gets a copy.

    Raises:
        DataError: If the tokenizer is missing.
        ConfigError: If it lacks an end-of-sequence token to append.
    """

    def __init__(self, options: PreprocessOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer(options.tokenizer)
        warn_of_missing_beginning(self._tokenizer)
        self.dtype = token_dtype(largest_id(self._tokenizer) + 1)
        """Dtype in which ids are stored."""
        self._eod: int | None = self._tokenizer.eos_token_id if options.append_eod else None
        if options.append_eod and self._eod is None:
            raise ConfigError(
                f"append_eod needs an eos_token, {options.tokenizer} has none in its tokenizer_config.json"
            )

    def __call__(self, piece: Piece) -> EncodedPiece:
        """Tokenize ``piece``."""
        options = self._options
        decoder = Decoder(TextEncoding(name=options.encoding, errors=options.errors))
        documents, bad = read_documents(piece, options.json_keys, decoder)
        keys = []
        for column in range(len(options.json_keys)):
            keys.append(self._encode_key([texts[column] for texts in documents]))
        return EncodedPiece(bad, piece.num_bytes, keys, decoder.num_replaced)

    def _encode_key(self, texts: Sequence[str]) -> EncodedKey:
        options = self._options
        groups = [[text] for text in texts]
        if options.split_sentences:
            groups = [
                split_sentences(text, options.language, options.keep_newlines) for text in texts
            ]
        encode = batch_encoder(self._tokenizer)
        encoded = iter(encode(list(chain.from_iterable(groups))))
        sequences: list[list[int]] = []
        counts: list[int] = []
        for group in groups:
            kept = [ids for _, ids in zip(group, encoded, strict=False) if ids]
            if kept and self._eod is not None:
                kept[-1].append(self._eod)
            sequences += kept
            counts.append(len(kept))
        lengths = [len(ids) for ids in sequences]
        # Raises OverflowError for an id that the dtype cannot hold.
        flat = np.fromiter(
            chain.from_iterable(sequences),
            dtype=self.dtype,
            count=sum(lengths),
        )
        return flat.tobytes(), lengths, counts


def split_sentences(
    text: str,
    language: str,
    keep_newlines: bool,
) -> list[str]:
    """Split ``text`` into sentences that are not blank.

    Args:
        text: Any text.
        language: ISO 639 code.
        keep_newlines: Keep the white space between two sentences at the end of the first; otherwise it is dropped.
    """
    # In the extra "data".
    from sentencex import segment

    plain = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
    try:
        sentences: list[str] = segment(language, plain)
    except BaseException as error:
        # The library has printed its panic; one text that remains a single sentence is no reason to end the run.
        if type(error).__name__ != "PanicException":
            raise
        sentences = [plain]
    bounds: list[tuple[int, int]] = []
    position = 0
    for sentence in filter(None, map(str.strip, sentences)):
        # Searched, not counted: the library drops some white space of long texts.
        start = plain.index(sentence, position)
        position = start + len(sentence)
        bounds.append((start, position))
    if keep_newlines and bounds:
        starts = [start for start, _ in bounds[1:]]
        bounds = list(pairwise([0, *starts, len(text)]))
    return [text[start:stop] for start, stop in bounds]


def _encode_all(
    pieces: Iterator[Piece],
    encode: Callable[[Piece], EncodedPiece],
    workers: int,
) -> Generator[EncodedPiece, None, None]:
    """Tokenize all pieces in input order, here or in ``workers`` processes, which end with the iterator.

    Raises:
        RuntimeError: If a worker fails or is killed.
    """
    # torch's import takes seconds.
    from lightning_megatron.data.workers import parallel_map

    options: dict[str, Any] = {}
    if workers > 1:
        # Fork shares everything loaded, including the tokenizer; libraries of macOS do not survive it.
        options = {
            "num_workers": workers,
            "prefetch_factor": PREFETCH_FACTOR,
            "multiprocessing_context": "fork" if sys.platform == "linux" else "spawn",
        }
    failure = ""
    # The processes are the parallelism: the tokenizers library would use all cores of the machine in each of them.
    with mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}):
        try:
            yield from parallel_map(encode, pieces, options)
        except RuntimeError as error:
            failure = str(error)
    # Outside the handler: the traceback of torch's error would keep the other workers alive.
    if failure:
        raise RuntimeError(
            f"a tokenizing worker failed; if it was killed, memory may have run out: {failure}"
        )
