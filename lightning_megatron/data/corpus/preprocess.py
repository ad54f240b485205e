"""How does a corpus become an indexed dataset: tokenize documents in parallel, write them in order?"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data.corpus.bad_documents import BadDocuments
from lightning_megatron.data.corpus.encoder import DocumentEncoder
from lightning_megatron.data.corpus.files import PLAIN_TEXT_KEY, check_keys, find_files
from lightning_megatron.data.corpus.pieces import cut_into_pieces
from lightning_megatron.data.corpus.sentences import SentenceSplitter
from lightning_megatron.data.corpus.tokenizer import largest_id, load_tokenizer
from lightning_megatron.data.corpus.worker_pool import encode_all
from lightning_megatron.data.indexed import IndexedDatasetWriter, exit_on_sigterm, token_dtype
from lightning_megatron.errors import ConfigError, DataError

_LARGEST_STORED_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What ``preprocess`` reads and writes."""

    input: Sequence[str | Path]
    """Files, folders and patterns: one JSON object a line, Parquet, or text files of one document each."""
    output_prefix: str | Path
    """P of the written files ``P_<key>_document.bin`` and ``.idx``; the key of text files is ``text``."""
    tokenizer: str | Path
    """Folder of a transformers tokenizer, or its name on the Hugging Face hub."""
    json_keys: Sequence[str] = (PLAIN_TEXT_KEY,)
    """Keys of the JSON objects, or columns, to tokenize; each becomes a dataset of its own.

    Document i is the same in all of them. As in Megatron's datasets, a text without a token is a document without a
    sequence; models are not trained on it.
    """
    append_eod: bool = False
    """End every document that has a token with the tokenizer's end-of-sequence token."""
    split_sentences: bool = False
    """Make each sentence a sequence, as BERT's sentence order needs it, and name the dataset ``P_<key>_sentence``."""
    language: str = "en"
    """ISO 639 code of the language in which sentences are split."""
    keep_newlines: bool = False
    """Leave white space and newlines between sentences in the first of the two."""
    workers: int = 1
    """Processes that tokenize; the output does not depend on it."""
    on_error: Literal["skip", "fail"] = "fail"
    """Leave out lines, rows and files that are no documents, and count them; or end at the first one."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If a value cannot work.
        """
        if self.workers < 1:
            raise ConfigError(f"workers={self.workers} must be at least 1; this machine has {os.cpu_count()} cores")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            keys = " ".join(self.json_keys)
            raise ConfigError(f"json_keys={keys!r} must name at least one key, each once; correct the list")
        if self.on_error not in ("skip", "fail"):
            raise ConfigError(f"on_error={self.on_error} is not known; choose skip or fail")
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
    files = find_files(options.input)
    check_keys(files, options.json_keys)
    encoder = _encoder(options)
    level = "sentence" if options.split_sentences else "document"
    prefixes = tuple(f"{options.output_prefix}_{key}_{level}" for key in options.json_keys)
    total_bytes = sum(path.stat().st_size for path in files)
    began = time.perf_counter()
    num_tokens = [0] * len(prefixes)
    num_documents = num_empty = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype)) for prefix in prefixes]
        pieces = cut_into_pieces(files, options.json_keys)
        encoded = stack.enter_context(encode_all(pieces, encoder, options.workers))
        bar = stack.enter_context(_progress_bar(total_bytes))
        bad = BadDocuments(options.on_error, lambda line: bar.write(line, file=sys.stderr))
        for piece in encoded:
            bad.add(piece.path, piece.bad, piece.num_bad, piece.num_units)
            for number, (writer, part) in enumerate(zip(writers, piece.keys, strict=True)):
                writer.add_documents(part.tokens, part.lengths, part.sequences)
                num_tokens[number] += len(part.tokens) // encoder.dtype.itemsize
                num_empty += part.num_empty
            num_documents += piece.num_documents
            bar.set_postfix(docs=f"{num_documents:,}", tokens=f"{sum(num_tokens):,}", refresh=False)
            bar.update(piece.num_bytes)
        _require_tokens(options, num_tokens, len(files), bad.count)
        for writer in writers:
            writer.complete()
    return PreprocessResult(
        prefixes=prefixes,
        documents=num_documents,
        empty_documents=num_empty,
        skipped=bad.count,
        tokens=sum(num_tokens),
        bytes=total_bytes,
        seconds=time.perf_counter() - began,
    )


def _encoder(options: PreprocessOptions) -> DocumentEncoder:
    splitter = SentenceSplitter(options.language, options.keep_newlines) if options.split_sentences else None
    tokenizer = load_tokenizer(options.tokenizer)
    if options.append_eod and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"append_eod needs an end-of-sequence token, {options.tokenizer} has none; set eos_token in its"
            " tokenizer_config.json or leave --append-eod out"
        )
    largest = largest_id(tokenizer)
    if largest > _LARGEST_STORED_ID:
        raise DataError(
            f"{options.tokenizer} has the token id {largest}, the largest that a dataset can hold is"
            f" {_LARGEST_STORED_ID}; number its tokens anew"
        )
    return DocumentEncoder(
        tokenizer=tokenizer,
        keys=tuple(options.json_keys),
        dtype=token_dtype(largest + 1),
        end_of_document=tokenizer.eos_token_id if options.append_eod else None,
        split=splitter,
        stop_at_bad=options.on_error == "fail",
    )


def _require_tokens(options: PreprocessOptions, num_tokens: list[int], num_files: int, num_skipped: int) -> None:
    for key, tokens in zip(options.json_keys, num_tokens, strict=True):
        if not tokens:
            skipped = f" ({num_skipped} lines, rows or files were skipped)" if num_skipped else ""
            raise DataError(
                f"no document has a token under '{key}' in {num_files} files{skipped}; give inputs with text"
            )


def _progress_bar(total_bytes: int) -> Any:
    from tqdm import tqdm

    # 1 MB/s here is 10**6 bytes of input a second. A log file gets a line every ten seconds, not two a second.
    interval = 0.5 if sys.stderr.isatty() else 10
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc="Tokenizing", mininterval=interval)
