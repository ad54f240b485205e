"""Corpora that are read as they are trained on: documents of files or of a streaming dataset, from any position.

A corpus is divided into shares, one for each reader. A file of JSON lines is cut into chunks of bytes, a compressed one
or a table into chunks of lines or rows; a share has every n-th chunk, so shares of any number have each document once.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from lightning_megatron.data.contents import hash_of_files
from lightning_megatron.data.documents import text_of_row
from lightning_megatron.data.input_files import find_files, format_of
from lightning_megatron.data.json_lines import cut_lines
from lightning_megatron.data.pieces import Piece, document_limit
from lightning_megatron.data.tables import cut_rows
from lightning_megatron.errors import ConfigError, DataError, type_of

_LARGEST_CHUNK = 1 << 20
_SMALLEST_CHUNK = 1 << 12
_CHUNKS = 1024
"""A corpus has at least so many chunks, unless they would be too small: shares are then of similar size."""
Position: TypeAlias = Any
"""Where to read on: plain data, of which only the corpus knows the meaning."""


@dataclass(frozen=True)
class Share:
    """Every ``modulus``-th chunk of a corpus, from number ``residue`` on."""

    modulus: int = 1
    residue: int = 0

    def has(self, number: int) -> bool:
        """Whether the chunk of this number belongs to the share."""
        return number % self.modulus == self.residue

    def split(self, parts: int) -> list[Share]:
        """Shares that together have the chunks of this one."""
        return [
            Share(self.modulus * parts, self.residue + part * self.modulus) for part in range(parts)
        ]


@dataclass(frozen=True)
class RawDocument:
    """A document before it is tokenized, which a worker process decodes."""

    location: str
    """For messages: file, and line, row or byte."""
    content: bytes | str | None
    """A JSON line, a text, or None for the text file at ``location``."""

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text."""
        if self.content is None:
            return Path(self.location).stat().st_size
        return len(self.content)


class DocumentCursor(Protocol):
    """Iterator of documents that knows its position."""

    def __next__(self) -> RawDocument:
        """Read the next document."""

    def position(self) -> Position:
        """Position after the last document."""


class Corpus(Protocol):
    """Documents in an order that only the number of the pass changes."""

    splits_shares: bool
    """Whether a share can be split from any position on."""

    @property
    def fingerprint(self) -> str:
        """Equal for the same documents in the same order."""

    @property
    def contents(self) -> str:
        """Hash of what a few documents hold; empty if that is not known without reading all before them."""

    def open(self, share: Share, pass_index: int, position: Position | None) -> DocumentCursor:
        """Documents of a share from a position on; None: from the first."""


class FileCorpus:
    """Documents of JSON lines, Parquet and text files, also compressed.

    Args:
        inputs: Files, directories and patterns.
        key: Key or column of the text.
        seed: Seed of the order of files; None: sorted as ``find_files`` does.
    """

    splits_shares = True

    def __init__(self, inputs: Sequence[str], key: str, seed: int | None) -> None:
        self.files = find_files(inputs, [key])
        self.key = key
        self._seed = seed
        sizes = [file.stat().st_size for file in self.files]
        self._sizes = sizes
        chunk = sum(sizes) // _CHUNKS
        self.chunk_bytes = min(max(chunk, _SMALLEST_CHUNK), _LARGEST_CHUNK)
        """Bytes of a chunk; depends on the sizes of the files alone."""

    @property
    def fingerprint(self) -> str:
        """Hash of names and sizes, which are known without reading the files."""
        names = [file.name for file in self.files]
        facts = json.dumps([names, self._sizes, self.key, self._seed])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def contents(self) -> str:
        """Hash of a few bytes of the files."""
        return hash_of_files(self.files)

    def open(self, share: Share, pass_index: int, position: Position | None) -> DocumentCursor:
        """Documents of a share from a position on."""
        order = list(range(len(self.files)))
        if self._seed is not None:
            order = np.random.default_rng((self._seed, pass_index)).permutation(order).tolist()
        return _FileCursor(self, share, order, position or [0, 0, 0])

    def chunks(
        self, number: int, share: Share, first: int
    ) -> Iterator[tuple[int, Iterator[RawDocument]]]:
        """Chunks of a file that belong to a share, from number ``first`` on, with their documents.

        The number of a file is added to those of its chunks, so that files of one chunk are spread over the shares.
        """
        path = self.files[number]
        size = self._sizes[number]
        _check_unchanged(path, size)
        content, compression = format_of(path)
        if content == "text":
            if first == 0 and share.has(number):
                yield 0, iter([RawDocument(str(path), None)])
            return
        if content == "json lines" and not compression:
            for chunk in range(first, -(-size // self.chunk_bytes)):
                if share.has(number + chunk):
                    yield chunk, _lines_of_chunk(path, chunk, self.chunk_bytes)
            return
        limit = document_limit(path)
        if content == "parquet":
            pieces = cut_rows(str(path), size, [self.key], self.chunk_bytes, limit)
        else:
            pieces = cut_lines(str(path), size, self.chunk_bytes, limit)
        for chunk, piece in enumerate(pieces):
            if chunk < first:
                continue
            if share.has(number + chunk):
                yield chunk, self._documents_of_piece(piece)
            elif piece.problem:
                raise DataError(f"{path} {piece.problem}")

    def _documents_of_piece(self, piece: Piece) -> Iterator[RawDocument]:
        for line_number, line in enumerate(piece.lines.split(b"\n"), piece.first):
            if line and not line.isspace():
                yield RawDocument(f"{piece.path}, line {line_number}", line)
        for row_number, row in enumerate(piece.rows, piece.first):
            location = f"{piece.path}, row {row_number}"
            yield RawDocument(location, text_of_row(row, self.key, location))
        if piece.problem:
            raise DataError(f"{piece.path} {piece.problem}")


def _check_unchanged(path: Path, size: int) -> None:
    """Raise unless a file has the size with which it was divided: the end of a shorter one would be missing."""
    now = path.stat().st_size if path.is_file() else 0
    if now != size:
        raise DataError(
            f"{path}: expected {size} bytes, got {now}: it was changed while it was in use; restore it, or resume from "
            "the last checkpoint with the new one"
        )


def _lines_of_chunk(path: Path, chunk: int, chunk_bytes: int) -> Iterator[RawDocument]:
    """Lines of a file that begin within a chunk of bytes; blank ones are skipped."""
    begin = chunk * chunk_bytes
    end = begin + chunk_bytes
    try:
        with open(path, "rb") as stream:
            if begin > 0:
                # The line that began before belongs to an earlier chunk.
                stream.seek(begin - 1)
                begin += len(stream.readline()) - 1
            while begin < end and (line := stream.readline()):
                if not line.isspace():
                    yield RawDocument(f"{path}, byte {begin}", line)
                begin += len(line)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); allow access") from error


class _FileCursor:
    """Position: place of the file in the order of the pass, chunk, and documents of the chunk that were read."""

    def __init__(
        self,
        corpus: FileCorpus,
        share: Share,
        order: list[int],
        position: Sequence[int],
    ) -> None:
        self._place, self._chunk, self._document = position
        self._documents = self._read(corpus, share, order)

    def __next__(self) -> RawDocument:
        return next(self._documents)

    def position(self) -> list[int]:
        return [self._place, self._chunk, self._document]

    def _read(self, corpus: FileCorpus, share: Share, order: list[int]) -> Iterator[RawDocument]:
        while self._place < len(order):
            for chunk, documents in corpus.chunks(order[self._place], share, self._chunk):
                if chunk != self._chunk:
                    self._chunk = chunk
                    self._document = 0
                skipped = self._document
                for number, document in enumerate(documents):
                    if number >= skipped:
                        self._document = number + 1
                        yield document
            self._place += 1
            self._chunk = 0
            self._document = 0


class HuggingFaceCorpus:
    """Texts of a ``datasets.IterableDataset``, at the position that it keeps itself.

    Its shares are those of ``datasets.distributed.split_dataset_by_node``, whose number is fixed.

    Args:
        dataset: The dataset.
        key: Column of the text.

    Raises:
        ConfigError: If it is another kind of dataset.
    """

    splits_shares = False

    def __init__(self, dataset: Any, key: str) -> None:
        is_stream = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if not is_stream or type(dataset).__module__.partition(".")[0] != "datasets":
            raise ConfigError(
                f"dataset: expected a datasets.IterableDataset, got {type_of(dataset)}; give a Dataset's "
                "to_iterable_dataset(), or load_dataset(..., streaming=True)['train']"
            )
        self.dataset = dataset
        self.key = key

    @property
    def fingerprint(self) -> str:
        """Column of the text, and shards, by which positions count: a streaming dataset does not know its content."""
        return f"stream of {self.key} in {getattr(self.dataset, 'num_shards', None)} shards"

    @property
    def contents(self) -> str:
        """Empty: a stream is read from its beginning."""
        return ""

    def open(self, share: Share, pass_index: int, position: Position | None) -> DocumentCursor:
        """Documents of a share from a position on."""
        # The library is optional.
        from datasets.distributed import split_dataset_by_node

        # A copy in any case: the position belongs to the object.
        dataset = copy.deepcopy(self.dataset)
        if share.modulus > 1:
            dataset = split_dataset_by_node(dataset, rank=share.residue, world_size=share.modulus)
        dataset.set_epoch(pass_index)
        if position is not None:
            dataset.load_state_dict(copy.deepcopy(position))
        return _DatasetCursor(dataset, self.key)


class _DatasetCursor:
    def __init__(self, dataset: Any, key: str) -> None:
        self._dataset = dataset
        self._key = key
        self._rows: Iterator[Mapping[str, Any]] = iter(dataset)

    def __next__(self) -> RawDocument:
        row = next(self._rows)
        location = "a row of the streaming dataset"
        return RawDocument(location, text_of_row(row, self._key, location))

    def position(self) -> Position:
        return self._dataset.state_dict()
