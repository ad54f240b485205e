"""Tokenize a corpus into indexed datasets: documents in parallel, written in input order (``preprocess``).

Workers are those of ``torch.utils.data.DataLoader``, which keeps the order, bounds what waits and hears of a worker
that is killed by a signal of its own. ``concurrent.futures.ProcessPoolExecutor`` waits for ever for the rest of a
message that a killed worker has left half written (24 of 120 such runs hung).

Sentences are those of sentencex (MIT licence), which ships its rules and lists of abbreviations: nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_megatron.data.documents import (
    PLAIN_TEXT_KEY,
    BadDocuments,
    Piece,
    cut_into_pieces,
    find_files,
    progress_bar,
    read_documents,
    require_library,
)
from lightning_megatron.data.indexed import IndexedDatasetWriter, token_dtype
from lightning_megatron.data.tokenizer import batch_encoder, largest_id, load_tokenizer
from lightning_megatron.errors import ConfigError, DataError, require_choice, require_number
from lightning_megatron.files import exit_on_sigterm

PENDING_A_WORKER = 4
"""Pieces begun at a time: so many that a slow one does not stop the others, so few that memory stays constant."""

# sentencex 1.0.32 panics at white space of several bytes between an initial and a period; with spaces it never does.
_WIDE_SPACE = re.compile("[\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What ``preprocess`` reads and writes."""

    input: Sequence[str | Path]
    """Files, folders (searched recursively, without links to folders) and quoted patterns: .jsonl (one JSON object a
    line), .parquet, and text files of one document each; also .gz and .zst of JSON lines and text."""
    output_prefix: str | Path
    """What the names of the written files begin with; the key of text files is ``text``."""
    tokenizer: str | Path
    """Folder of a transformers tokenizer, or its name on the Hugging Face hub."""
    json_keys: Sequence[str] = (PLAIN_TEXT_KEY,)
    """Keys of the JSON objects, or columns, to tokenize; each becomes a dataset, and document i is the same in all of
    them: a text without a token becomes a document without a sequence, as in Megatron's datasets."""
    append_eod: bool = False
    """End every document that has a token with the tokenizer's end-of-sequence token."""
    split_sentences: bool = False
    """Make each sentence a sequence of its document, as samples of BERT and T5 need it."""
    language: str = "en"
    """Of the sentences: en, de, ja, ... (ISO 639)."""
    keep_newlines: bool = False
    """Leave the white space between two sentences at the end of the first; otherwise it is dropped."""
    workers: int = 1
    """Processes that tokenize, at one core each; the output does not depend on their number."""
    on_error: Literal["skip", "fail"] = "fail"
    """End at the first line, row or file that is no document, or report it, leave it out and count it."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If a value cannot work.
        """
        require_number("workers", self.workers, at_least=1)
        require_choice("on_error", self.on_error, ("skip", "fail"))
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            keys = " ".join(self.json_keys)
            raise ConfigError(f"json_keys={keys!r} must name at least one key, each once; correct the list")
        if self.keep_newlines and not self.split_sentences:
            raise ConfigError("keep_newlines needs split_sentences: whole documents keep theirs; leave it out")


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """What ``preprocess`` did."""

    prefixes: tuple[str, ...]
    """Written datasets, one a key: values for ``IndexedDataModule(data_path=...)``."""
    documents: int
    """Documents in each dataset, empty ones included."""
    empty_documents: int
    """Texts of any key that gave no token."""
    skipped: int
    """Lines, rows and files that are no documents."""
    tokens: int
    """Tokens in all datasets."""
    bytes: int
    """Bytes of input, as stored."""
    seconds: float
    """Wall time from the first byte read to the last one written; loading the tokenizer is not in it."""


def preprocess(options: PreprocessOptions) -> PreprocessResult:
    """Tokenize the inputs into one indexed dataset per key; the files appear when all of them are complete.

    Raises:
        DataError: If an input or the tokenizer is missing, unreadable or malformed, or no document has a token.
        ConfigError: If the tokenizer or the installation cannot do what is asked.
    """
    files = find_files(options.input, options.json_keys)
    encoder = _encoder(options)
    level = "sentence" if options.split_sentences else "document"
    prefixes = tuple(f"{options.output_prefix}_{key}_{level}" for key in options.json_keys)
    began = time.perf_counter()
    num_tokens = [0] * len(prefixes)
    num_documents = num_empty = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype)) for prefix in prefixes]
        pieces = cut_into_pieces(files, options.json_keys)
        encoded = stack.enter_context(contextlib.closing(_encode_all(pieces, encoder, options.workers)))
        bar = stack.enter_context(progress_bar(files, "Tokenizing"))
        bad = BadDocuments(options.on_error, lambda line: bar.write(line, file=sys.stderr))
        for piece in encoded:
            bad.add(piece.bad)
            for number, (writer, part) in enumerate(zip(writers, piece.keys, strict=True)):
                writer.add_documents(part.tokens, part.lengths, part.sequences)
                num_tokens[number] += sum(part.lengths)
                num_empty += (part.sequences or []).count(0)
            num_documents += piece.num_documents
            bar.set_postfix(docs=f"{num_documents:,}", tokens=f"{sum(num_tokens):,}", refresh=False)
            bar.update(piece.num_bytes)
        for key, tokens in zip(options.json_keys, num_tokens, strict=True):
            if not tokens:
                skipped = f" ({bad.count} lines, rows or files were skipped)" if bad.count else ""
                raise DataError(f"no document has a token under '{key}' in {len(files)} files{skipped}; give others")
        for writer in writers:
            writer.complete()
    return PreprocessResult(
        prefixes=prefixes,
        documents=num_documents,
        empty_documents=num_empty,
        skipped=bad.count,
        tokens=sum(num_tokens),
        bytes=bar.total,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, kw_only=True)
class EncodedKey:
    """One key's documents of one piece."""

    tokens: bytes
    """All ids one after the other, in the dataset's type."""
    lengths: list[int]
    """Tokens of each sequence: of a document, or of a sentence."""
    sequences: list[int] | None
    """Sequences of each document, none of one without a token; None if every document is one."""


@dataclass(frozen=True, kw_only=True)
class EncodedPiece:
    """What became of one piece."""

    bad: list[str]
    """What in it is no document."""
    num_bytes: int
    """Input bytes that it stands for."""
    num_documents: int
    """In each key."""
    keys: list[EncodedKey]
    """Documents that are bad under one key are in none of them."""


@dataclass(frozen=True, kw_only=True)
class DocumentEncoder:
    """Turns pieces into tokens, as they are stored; processes that tokenize get a copy."""

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

    def __call__(self, piece: Piece) -> EncodedPiece:
        """The tokens of ``piece``."""
        documents, bad = read_documents(piece, self.keys)
        columns = zip(*documents, strict=True) if documents else ((),) * len(self.keys)
        keys = [self._encode_key(texts) for texts in columns]
        return EncodedPiece(bad=bad, num_bytes=piece.num_bytes, num_documents=len(documents), keys=keys)

    def _encode_key(self, texts: Sequence[str]) -> EncodedKey:
        groups = [[text] if self.split is None else self.split(text) for text in texts]
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
        # An id that the type cannot hold is an OverflowError.
        flat = np.fromiter(chain.from_iterable(sequences), dtype=self.dtype, count=sum(lengths))
        return EncodedKey(
            tokens=flat.tobytes(),
            lengths=lengths,
            sequences=None if counts.count(1) == len(counts) else counts,
        )


@dataclass(frozen=True, kw_only=True)
class SentenceSplitter:
    """Cuts texts into sentences."""

    language: str
    """ISO 639 code."""
    keep_newlines: bool
    """Leave the white space between two sentences at the end of the first; else it is dropped."""

    def __post_init__(self) -> None:
        """Check the language, as the library takes anything that it does not know for English-like.

        Raises:
            ConfigError: If it is no ISO 639 code, or the library is not installed.
        """
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise ConfigError(f"language={self.language} is no ISO 639 code; write it like en, de or ja")
        require_library("sentencex", "split_sentences")

    def __call__(self, text: str) -> list[str]:
        """The sentences of ``text``, none of them blank."""
        from sentencex import segment

        plain = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
        try:
            sentences: list[str] = segment(self.language, plain)
        except BaseException as error:
            # A panic of the library has been printed by it; one text that stays whole is no reason to end the run.
            if type(error).__name__ != "PanicException":
                raise
            sentences = [plain]
        bounds: list[tuple[int, int]] = []
        position = 0
        for sentence in filter(None, map(str.strip, sentences)):
            # Found again, not counted: of a long text's white space some is missing in what comes back.
            start = plain.index(sentence, position)
            position = start + len(sentence)
            bounds.append((start, position))
        if self.keep_newlines and bounds:
            starts = [0, *(start for start, _ in bounds[1:]), len(text)]
            bounds = list(zip(starts, starts[1:], strict=False))
        return [text[start:stop] for start, stop in bounds]


def _encoder(options: PreprocessOptions) -> DocumentEncoder:
    splitter = None
    if options.split_sentences:
        splitter = SentenceSplitter(language=options.language, keep_newlines=options.keep_newlines)
    tokenizer = load_tokenizer(options.tokenizer)
    if options.append_eod and tokenizer.eos_token_id is None:
        raise ConfigError(f"append_eod needs an eos_token, {options.tokenizer} has none in its tokenizer_config.json")
    return DocumentEncoder(
        tokenizer=tokenizer,
        keys=tuple(options.json_keys),
        dtype=token_dtype(largest_id(tokenizer) + 1),
        end_of_document=tokenizer.eos_token_id if options.append_eod else None,
        split=splitter,
    )


# ---- worker processes -----------------------------------------------------------------------------------------------


class _Encoded:
    """What a DataLoader reads: an item is an encoded piece, and its key the piece.

    A mistake of the user's is an item, too: a DataLoader would hide its message behind a worker's traceback.
    """

    def __init__(self, encode: Callable[[Piece], EncodedPiece]) -> None:
        self._encode = encode

    def __getitem__(self, piece: Piece) -> EncodedPiece | ConfigError:
        try:
            return self._encode(piece)
        except ConfigError as error:
            return error


def _encode_all(
    pieces: Iterator[Piece], encode: Callable[[Piece], EncodedPiece], workers: int
) -> Generator[EncodedPiece, None, None]:
    """The tokens of each piece in input order, encoded here or by ``workers`` processes, which end with the iterator.

    Raises:
        RuntimeError: If a worker fails or is killed.
    """
    from torch.utils.data import DataLoader

    parallel: dict[str, Any] = {}
    if workers > 1:
        # Fork shares what is loaded, the tokenizer included; macOS libraries do not survive it.
        context = "fork" if sys.platform == "linux" else "spawn"
        parallel = {"num_workers": workers, "prefetch_factor": PENDING_A_WORKER, "multiprocessing_context": context}
    read: Any = _Encoded(encode)
    items: Any = DataLoader(read, batch_size=None, sampler=pieces, **parallel)
    failure = ""
    with _one_thread():
        try:
            for item in items:
                if isinstance(item, ConfigError):
                    raise item
                yield item
        except RuntimeError as error:
            failure = str(error)
    if failure:  # behind the handler: the traceback of torch's error would keep the other workers alive
        raise RuntimeError(f"a tokenizing worker failed; one that was killed often lacked memory: {failure}")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes are the parallelism; the tokenizers library would take all cores of the machine in each of them."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
