"""Streams of rows of one replica: texts of one or several corpora, tokenized and packed while they are trained on."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_megatron.data.corpus import Corpus, Share
from lightning_megatron.data.document_tokenizer import (
    DocumentTokenizer,
    TokenizedJob,
    TokenizeJob,
)
from lightning_megatron.data.gpt_samples import PADDING
from lightning_megatron.data.packed_reader import PackedReader, ReaderState, Row
from lightning_megatron.data.samples import Rows
from lightning_megatron.data.workers import parallel_map
from lightning_megatron.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What rows are made of, and how."""

    corpora: Sequence[Corpus]
    """Sources of documents."""
    weights: Sequence[float]
    """Share of the rows that comes from each source."""
    tokenize: DocumentTokenizer
    """Called in worker processes."""
    seq_length: int
    """Predictions of a row, which has one token more."""
    shuffle_buffer: int
    """Documents that are shuffled at a time; 0 keeps their order."""
    separate_documents: bool
    """Whether rows have segments and positions of their documents."""
    seed: int
    """Seed of the order."""
    num_workers: int
    """Worker processes that tokenize; 0: this process."""


def first_states(options: StreamOptions, dp: int, pass_index: int = 0) -> list[ReaderState]:
    """Readers of the beginning of a pass: for each source one per replica."""
    states = []
    for source in range(len(options.corpora)):
        for share in Share().split(dp):
            states.append(
                ReaderState(source=source, share=share, buffer_share=share, pass_index=pass_index)
            )
    return states


def distribute(
    options: StreamOptions, states: Sequence[ReaderState], dp: int
) -> list[list[ReaderState]]:
    """Readers of each of ``dp`` replicas that go on where others stopped, at any number of them.

    Raises:
        ConfigError: If a source has fewer readers than replicas, and they cannot be split.
    """
    replicas: list[list[ReaderState]] = [[] for _ in range(dp)]
    for source, corpus in enumerate(options.corpora):
        readers = [state for state in states if state.source == source]
        parts = math.lcm(len(readers), dp) // len(readers)
        if corpus.splits_shares and parts > 1:
            readers = [part for reader in readers for part in reader.split(parts)]
        if len(readers) < dp:
            raise ConfigError(
                f"dp={dp}: expected at most the {len(readers)} data-parallel replicas of the run that wrote the "
                "checkpoint, as the readers of its streaming dataset cannot be split; resume with fewer replicas"
            )
        readers.sort(key=lambda state: state.share.residue)
        for number, reader in enumerate(readers):
            replicas[number % dp].append(reader)
    return replicas


class TextStream:
    """Rows of one replica, from any position on.

    Args:
        options: What rows are made of.
        states: Readers of this replica.
        num_rows: Rows of a batch.
        repeats: Whether passes follow one another; otherwise the stream ends with the pass.
    """

    def __init__(
        self,
        options: StreamOptions,
        states: Sequence[ReaderState],
        *,
        num_rows: int,
        repeats: bool,
    ) -> None:
        self._options = options
        self._num_rows = num_rows
        self._repeats = repeats
        self._readers = [
            PackedReader(
                options.corpora[state.source],
                state,
                seq_length=options.seq_length,
                shuffle_buffer=options.shuffle_buffer,
                seed=options.seed,
                repeats=repeats,
            )
            for state in states
        ]
        self._sources = [state.source for state in states]
        self._jobs = self._tokenized()

    def state(self) -> list[dict[str, Any]]:
        """Positions of the readers after the last batch, as plain data."""
        return [reader.state.as_dict() for reader in self._readers]

    def next(self) -> Rows | None:
        """Next batch, padded if the pass ends within it; None after its end.

        ``text`` [rows, seq_length + 1] int64. With ``separate_documents`` also ``attention_mask``, the number of the
        document within its row, ``position_ids`` and ``loss_mask``, [rows, seq_length] each.

        Raises:
            DataError: If a document is not valid or cannot be read, or passes follow one another and have none.
        """
        rows = []
        for _ in range(self._num_rows):
            row = self._next_row()
            if row is None:
                break
            rows.append(row)
        if rows and not (self._repeats and len(rows) < self._num_rows):
            return self._stack(rows)
        if self._repeats:
            raise DataError(
                "a data-parallel replica has no training text: there are too few for so many; add texts, or use fewer "
                "replicas"
            )
        return None

    def padding(self) -> Rows:
        """Batch without targets, for a replica whose pass has ended before that of others."""
        return self._stack([])

    def close(self) -> None:
        """End the worker processes."""
        self._jobs.close()

    def _next_row(self) -> Row | None:
        reader = self._next_reader()
        if reader is None:
            return None
        return reader.take_row()

    def _next_reader(self) -> PackedReader | None:
        """Reader whose turn it is, with a row to take; None if all have ended.

        Of the sources, that which is furthest behind its weight; of its readers, that with the fewest rows.
        """
        while True:
            left = [index for index, reader in enumerate(self._readers) if not reader.has_ended]
            if not left:
                return None
            counts = [0] * len(self._options.corpora)
            for source, reader in zip(self._sources, self._readers, strict=True):
                counts[source] += reader.state.num_rows
            sources = sorted({self._sources[index] for index in left})
            next_total = sum(counts) + 1
            weights = self._options.weights
            source = max(sources, key=lambda one: weights[one] * next_total - counts[one])
            candidates = [index for index in left if self._sources[index] == source]
            chosen = min(candidates, key=lambda index: self._readers[index].state.num_rows)
            reader = self._readers[chosen]
            while not reader.has_row and not reader.has_ended:
                self._receive()
            if reader.has_row:
                return reader

    def _receive(self) -> None:
        """Take the next tokenized documents, of whichever reader."""
        job = next(self._jobs)
        self._readers[job.reader].add(job.documents)

    def _tokenized(self) -> Generator[TokenizedJob, None, None]:
        # A private generator: the DataLoader draws a seed for its workers, which must not advance that of dropout.
        options: dict[str, Any] = {"generator": torch.Generator()}
        if self._options.num_workers > 0:
            options["num_workers"] = self._options.num_workers
            options["worker_init_fn"] = _use_one_thread
        yield from parallel_map(self._options.tokenize, self._next_jobs(), options)

    def _next_jobs(self) -> Iterator[TokenizeJob]:
        """Documents to tokenize, of the reader whose weight asks for them most; results do not depend on this order."""
        while True:
            left = [index for index, reader in enumerate(self._readers) if not reader.all_read]
            if not left:
                return
            chosen = min(left, key=self._supply)
            documents = self._readers[chosen].next_documents()
            yield TokenizeJob(chosen, documents)

    def _supply(self, index: int) -> float:
        """Text that waits to become rows of a reader, relative to the rows that are taken of it."""
        source = self._sources[index]
        weight = self._options.weights[source] / self._sources.count(source)
        return self._readers[index].num_waiting_bytes / weight

    def _stack(self, rows: Sequence[Row]) -> Rows:
        length = self._options.seq_length
        text = np.full((self._num_rows, length + 1), PADDING, dtype=np.int64)
        for number, row in enumerate(rows):
            text[number, : len(row.tokens)] = row.tokens
        batch = {"text": torch.from_numpy(text)}
        if self._options.separate_documents:
            batch.update(_documents_of(rows, text))
        return batch


class TextBatches:
    """Batches of one replica, as ``StreamLoader`` takes them.

    Args:
        options: What rows are made of.
        dp: Number of data-parallel replicas.
        rank: This replica.
        num_rows: Rows of a batch.
        repeats: Whether passes follow one another; otherwise each epoch is one pass.
    """

    def __init__(
        self,
        options: StreamOptions,
        *,
        dp: int,
        rank: int,
        num_rows: int,
        repeats: bool,
    ) -> None:
        self._options = options
        self._dp = dp
        self._rank = rank
        self._num_rows = num_rows
        self._repeats = repeats

    def open(self, epoch: int, states: list[Any] | None) -> TextStream:
        """Begin the pass of an epoch, or go on from the positions of all replicas."""
        readers = first_states(self._options, self._dp, epoch)
        if states is not None:
            readers = saved_readers(states)
        if self._repeats:
            readers = [reader.next_pass() if reader.has_ended else reader for reader in readers]
        own = distribute(self._options, readers, self._dp)[self._rank]
        return TextStream(self._options, own, num_rows=self._num_rows, repeats=self._repeats)


def saved_readers(states: Sequence[Sequence[dict[str, Any]]]) -> list[ReaderState]:
    """Readers of all replicas, from what ``TextStream.state`` returned on each."""
    return [ReaderState.from_dict(reader) for replica in states for reader in replica]


class PackedTexts:
    """All rows of one pass over a corpus in memory, for evaluation.

    Args:
        options: What rows are made of.
        name: The split, for messages.

    Raises:
        DataError: If there is no row.
    """

    def __init__(self, options: StreamOptions, name: str) -> None:
        stream = TextStream(options, first_states(options, 1), num_rows=1, repeats=False)
        rows = []
        while (row := stream.next()) is not None:
            rows.append(row)
        if not rows:
            raise DataError(f"the {name} split has no text of two tokens; give others")
        self._rows = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
        tokens = self._rows["text"].numpy().tobytes()
        self.fingerprint = hashlib.sha256(tokens).hexdigest()[:16]
        """Hash of the tokens."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows["text"])

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows at ``indices``, as those of ``TextStream``."""
        return {key: values[list(indices)] for key, values in self._rows.items()}


def _use_one_thread(worker: int) -> None:
    # The processes are the parallelism: the tokenizers library would use all cores of the machine in each of them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _documents_of(rows: Sequence[Row], text: Any) -> Rows:
    """Segments and positions of the documents of rows, and no loss where the target is another document's first token.

    Args:
        rows: The rows; padding follows on the last one.
        text: [num_rows, seq_length + 1], padded.
    """
    shape = (len(text), text.shape[1] - 1)
    segments = np.zeros(shape, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    loss_mask = np.ones(shape, dtype=np.float32)
    for number, row in enumerate(rows):
        bounds = [*row.starts, len(row.tokens)]
        for document, begin in enumerate(row.starts, 1):
            end = min(bounds[document], shape[1])
            segments[number, begin:end] = document
            positions[number, begin:end] = np.arange(end - begin)
            if begin > 0:
                loss_mask[number, begin - 1] = 0.0
    return {
        "attention_mask": torch.from_numpy(segments),
        "position_ids": torch.from_numpy(positions),
        "loss_mask": torch.from_numpy(loss_mask),
    }
