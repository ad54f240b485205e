"""How does a corpus become an indexed dataset: tokenize documents in parallel, write them in order?"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_megatron.data.corpus.documents import PLAIN_TEXT_KEY, Piece, cut_into_pieces, find_files, read_documents
from lightning_megatron.data.corpus.tokenizer import load_tokenizer
from lightning_megatron.data.formats.legacy import TOKEN_DTYPE, LegacyDatasetWriter
from lightning_megatron.data.formats.mmap import IndexedDatasetWriter, token_dtype
from lightning_megatron.errors import ConfigError, DataError

_WRITERS = {"mmap": IndexedDatasetWriter, "cached": LegacyDatasetWriter, "lazy": LegacyDatasetWriter}


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """What ``preprocess`` reads and writes."""

    input: Sequence[str | Path]
    """Files, folders and patterns: .jsonl with one JSON object a line, or text files of one document each."""
    output_prefix: str | Path
    """P of the written files ``P_<key>_document.bin`` and ``.idx``; the key of text files is ``text``."""
    tokenizer: str | Path
    """Folder of a transformers tokenizer."""
    json_keys: Sequence[str] = (PLAIN_TEXT_KEY,)
    """Keys of the JSON objects to tokenize; each becomes a dataset of its own."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-sequence token."""
    workers: int = 1
    """Processes that tokenize; the output does not depend on it."""
    dataset_impl: Literal["mmap", "cached", "lazy"] = "mmap"
    """Format of the output: the one that Megatron-Core maps into memory, or, under two names, that of Megatron 1.x."""

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
        if self.dataset_impl not in _WRITERS:
            raise ConfigError(f"dataset_impl={self.dataset_impl} is not written; choose from {', '.join(_WRITERS)}")


@dataclass(frozen=True, kw_only=True)
class PreprocessResult:
    """What ``preprocess`` did."""

    prefixes: tuple[str, ...]
    """Written datasets, one a key: values for ``IndexedDataModule(data_path=...)``."""
    documents: int
    """Documents in the first dataset."""
    empty_documents: int
    """Texts of any key that gave no token and were left out."""
    tokens: int
    """Tokens in all datasets."""
    bytes: int
    """Bytes of input."""
    seconds: float
    """Wall time."""


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """One key's documents of one piece."""

    lengths: list[int]
    tokens: bytes
    num_empty: int


_Encode: TypeAlias = Callable[[Piece], list[_Encoded]]


def preprocess(options: PreprocessOptions) -> PreprocessResult:
    """Tokenize the inputs into one indexed dataset per key; the files appear when all of them are complete.

    Raises:
        DataError: If an input or the tokenizer is missing, unreadable or malformed, or no document has a token.
    """
    began = time.perf_counter()
    files = find_files(options.input)
    encoder = _Encoder(options)
    prefixes = tuple(f"{options.output_prefix}_{key}_document" for key in options.json_keys)
    writer_of = _WRITERS[options.dataset_impl]
    num_tokens = num_empty = 0
    total_bytes = sum(path.stat().st_size for path in files)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writer_of(prefix, encoder.dtype)) for prefix in prefixes]
        encoded = stack.enter_context(_encode_all(files, encoder, options))
        bar = stack.enter_context(_progress_bar(total_bytes))
        for piece, parts in encoded:
            for writer, part in zip(writers, parts, strict=True):
                writer.add_documents(part.tokens, part.lengths)
                num_tokens += len(part.tokens) // encoder.dtype.itemsize
                num_empty += part.num_empty
            bar.set_postfix(docs=writers[0].num_documents, tokens=num_tokens, refresh=False)
            bar.update(piece.num_bytes)
        for writer, key in zip(writers, options.json_keys, strict=True):
            if writer.num_documents == 0:
                raise DataError(f"no document has a token under '{key}' in {len(files)} files; give inputs with text")
        documents = writers[0].num_documents
    return PreprocessResult(
        prefixes=prefixes,
        documents=documents,
        empty_documents=num_empty,
        tokens=num_tokens,
        bytes=total_bytes,
        seconds=time.perf_counter() - began,
    )


class _Encoder:
    """Turns a piece into tokens; made once in each process."""

    def __init__(self, options: PreprocessOptions) -> None:
        tokenizer = load_tokenizer(options.tokenizer)
        self._encode_batch = _batch_encoder(tokenizer)
        self._keys = list(options.json_keys)
        self._suffix: list[int] = []
        if options.append_eod:
            if tokenizer.eos_token_id is None:
                raise ConfigError(
                    f"append_eod needs an end-of-sequence token, {options.tokenizer} has none; set eos_token in its"
                    " tokenizer_config.json or leave --append-eod out"
                )
            self._suffix = [tokenizer.eos_token_id]
        self.dtype = token_dtype(len(tokenizer)) if options.dataset_impl == "mmap" else TOKEN_DTYPE

    def __call__(self, piece: Piece) -> list[_Encoded]:
        """The tokens of ``piece``, one entry a key."""
        documents = list(read_documents(piece, self._keys))
        return [self._encode_column([texts[column] for texts in documents]) for column in range(len(self._keys))]

    def _encode_column(self, texts: list[str]) -> _Encoded:
        sequences = [ids + self._suffix for ids in self._encode_batch(texts) if ids]
        lengths = [len(ids) for ids in sequences]
        flat = np.fromiter((token for ids in sequences for token in ids), dtype=self.dtype, count=sum(lengths))
        return _Encoded(lengths=lengths, tokens=flat.tobytes(), num_empty=len(texts) - len(sequences))


def _batch_encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Token ids of each text without special tokens; by the Rust library itself, which skips slow bookkeeping."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    # A saved tokenizer may carry the limits of its last use; a corpus is never cut.
    backend.no_truncation()
    backend.no_padding()
    return lambda texts: [item.ids for item in backend.encode_batch_fast(texts, add_special_tokens=False)]


@contextlib.contextmanager
def _encode_all(
    files: Sequence[Path], encoder: _Encode, options: PreprocessOptions
) -> Iterator[Iterator[tuple[Piece, list[_Encoded]]]]:
    """Pieces in input order with their tokens, encoded here or by worker processes."""
    pieces = cut_into_pieces(files)
    if options.workers == 1:
        yield ((piece, encoder(piece)) for piece in pieces)
        return
    # Fork shares the modules that are loaded; macOS libraries do not survive it.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    # Not multiprocessing.Pool: it waits for ever when a worker is killed, e.g. for its memory.
    pool = ProcessPoolExecutor(options.workers, context, initializer=_start_worker, initargs=(options,))
    try:
        yield _in_order(pool, pieces, max_pending=4 * options.workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, pieces: Iterator[Piece], max_pending: int
) -> Iterator[tuple[Piece, list[_Encoded]]]:
    """Results in the order of ``pieces``; the bound keeps memory constant however large the corpus is."""
    pending: deque[tuple[Piece, Future[list[_Encoded]]]] = deque()
    try:
        for piece in pieces:
            pending.append((piece, pool.submit(_encode_in_worker, piece)))
            if len(pending) >= max_pending:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError("a tokenizing worker was killed, probably for its memory; use fewer workers") from error


_worker_encoder: _Encode | None = None


def _start_worker(options: PreprocessOptions) -> None:
    """Make this process's encoder; a global is the only state that a pool can give to its tasks."""
    global _worker_encoder
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # One thread a worker: the workers are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_encoder = _Encoder(options)


def _exit_with_parent() -> None:
    """A killed parent cannot end its workers, which would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs only in workers"
    parent.join()
    os._exit(1)


def _encode_in_worker(piece: Piece) -> list[_Encoded]:
    assert _worker_encoder is not None, "the pool runs _start_worker first"
    return _worker_encoder(piece)


def _progress_bar(total_bytes: int) -> Any:
    from tqdm import tqdm

    # 1 MB/s here is 10**6 bytes of input a second.
    return tqdm(total=total_bytes, unit="B", unit_scale=True, desc="Tokenizing", mininterval=0.5)
