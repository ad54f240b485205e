r"""How are tokens stored on disk: Megatron's indexed dataset, a pair ``PREFIX.bin`` and ``PREFIX.idx`` ("mmap")?

Layout, little endian. ``.bin``: all tokens one after the other. ``.idx``: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8
type of a token; u64 N sequences; u64 D; int32[N] lengths in tokens; int64[N] positions in bytes; int64[D] the first
sequence of each document and, last, N; optionally int8[N] modes. For GPT a document is one sequence, so D = N + 1.

The writer produces these bytes itself: the engine's builder would cost the import of torch, and leaves half-written
files under the final names when it is interrupted. The reader checks what the engine maps into memory unseen.
Source: megatron-core 0.16.1, datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
"""

from __future__ import annotations

import shlex
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats.index_files import (
    INTEGER_CODES,
    LEGACY_MAGIC,
    MMAP_MAGIC,
    StagedPair,
    check_document_bounds,
    existing_pair,
    read_chunks,
)
from lightning_megatron.errors import DataError

HEADER_BYTES = 34
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this are stored as uint16, larger ones as int32: Megatron's rule (``DType.optimal_dtype``)."""

_FLOAT_CODES = {6: np.dtype("<f8"), 7: np.dtype("<f4")}


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """What the first bytes of a valid ``.idx`` say; its size agrees with them."""

    prefix: str
    """Path of both files without suffix."""
    dtype: np.dtype[Any]
    """Type of a token in ``.bin``."""
    num_sequences: int
    """N."""
    num_document_bounds: int
    """D: one more than there are documents."""

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return self.num_document_bounds - 1


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def read_header(prefix: str) -> IndexHeader:
    """The header of the dataset at ``prefix``, after checks that touch only a few bytes of the files.

    Raises:
        DataError: If a file is missing or is not of this format, or the ``.idx`` has not the size that it announces.
    """
    idx_path, bin_path = existing_pair(prefix, "data_path")
    size = idx_path.stat().st_size
    with open(idx_path, "rb") as stream:
        head = stream.read(HEADER_BYTES)
    _require_magic(idx_path, head)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{idx_path} has {size} bytes, its header alone needs {HEADER_BYTES}: truncated; {_AGAIN}")
    version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[9:])
    if version != 1:
        raise DataError(f"{idx_path} says version {version}, the only version is 1: damaged or foreign; {_AGAIN}")
    if code not in INTEGER_CODES:
        kind = "floating-point tokens" if code in _FLOAT_CODES else "an unknown token type"
        raise DataError(f"{idx_path} says token type {code} ({kind}), tokens are integers (1-5, 8); {_AGAIN}")
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if size not in (expected, expected + num_sequences):
        raise DataError(
            f"{idx_path} has {size} bytes, {num_sequences} sequences and {num_bounds} document bounds need {expected}:"
            f" truncated or damaged; {_AGAIN}"
        )
    if num_sequences == 0:
        raise DataError(f"{idx_path} holds no sequence; preprocess inputs that contain text into {prefix}")
    return IndexHeader(
        prefix=prefix, dtype=INTEGER_CODES[code], num_sequences=num_sequences, num_document_bounds=num_bounds
    )


def check_dataset(prefix: str) -> IndexHeader:
    """The header of the dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Raises:
        DataError: Also if a length is negative, a sequence lies outside ``.bin``, the files do not belong together, or
            the documents are not in order.
    """
    header = read_header(prefix)
    idx_path, bin_path = existing_pair(prefix, "data_path")
    bin_bytes = bin_path.stat().st_size
    total = 0
    for lengths, positions in zip(_lengths(header), _positions(header), strict=True):
        if lengths.min() < 0:
            raise DataError(f"{idx_path} has a sequence of {lengths.min()} tokens: damaged; {_AGAIN}")
        # Bounds that cannot overflow: a damaged position may be any 64-bit number.
        outside = (positions < 0) | (positions > bin_bytes - lengths.astype(np.int64) * header.dtype.itemsize)
        if outside.any():
            raise DataError(
                f"{bin_path} has {bin_bytes} bytes, {idx_path.name} points outside it (position"
                f" {positions[int(outside.argmax())]}): .bin is truncated or belongs to another .idx; {_AGAIN}"
            )
        total += int(lengths.sum(dtype=np.int64))
    if total * header.dtype.itemsize != bin_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, {idx_path.name} accounts for {total * header.dtype.itemsize}:"
            f" the two files do not belong together; {_AGAIN}"
        )
    offset = HEADER_BYTES + 12 * header.num_sequences
    bounds = read_chunks(idx_path, "<i8", header.num_document_bounds, offset)
    check_document_bounds(bounds, header.num_sequences, idx_path, _AGAIN)
    return header


def read_lengths(header: IndexHeader) -> NDArray[np.int32]:
    """Tokens of each sequence: [N], int32, read into memory so that no file stays open."""
    return np.concatenate(list(_lengths(header)))


def largest_token_at_the_ends(header: IndexHeader, num_tokens: int = 1 << 20) -> int:
    """The largest id among the first and the last ``num_tokens`` tokens; all of ``.bin`` may be terabytes."""
    path = Path(header.prefix + ".bin")
    total = path.stat().st_size // header.dtype.itemsize
    ends = [np.fromfile(path, header.dtype, num_tokens)]
    if total > num_tokens:
        ends.append(np.fromfile(path, header.dtype, num_tokens, offset=(total - num_tokens) * header.dtype.itemsize))
    return max((int(tokens.max()) for tokens in ends if tokens.size), default=0)


class IndexedDatasetWriter(StagedPair):
    """Writes a dataset of documents."""

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        super().__init__(prefix)
        self._dtype = dtype
        self._lengths = array("i")
        self._bounds: array[int] | None = None
        """None as long as every document is one sequence, which is what most corpora are: 8 bytes less for each."""

    def add_documents(self, tokens: bytes, lengths: Sequence[int]) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: The tokens of all of them, in the dataset's type.
            lengths: Tokens of each.
        """
        self.write(tokens)
        self._lengths.extend(lengths)
        if self._bounds is not None:
            self._bounds.extend(range(len(self._lengths) - len(lengths) + 1, len(self._lengths) + 1))

    def add_document(self, tokens: bytes, lengths: Sequence[int]) -> None:
        """Append one document of several sequences, e.g. sentences.

        Args:
            tokens: The tokens of all of them, in the dataset's type.
            lengths: Tokens of each.
        """
        if self._bounds is None:
            self._bounds = array("q", range(len(self._lengths) + 1))
        self.write(tokens)
        self._lengths.extend(lengths)
        self._bounds.append(len(self._lengths))

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths) if self._bounds is None else len(self._bounds) - 1

    def _written_lengths(self) -> NDArray[np.int32]:
        return np.array(self._lengths, dtype="<i4")

    def _written_bounds(self) -> NDArray[np.int64]:
        if self._bounds is None:
            return np.arange(len(self._lengths) + 1, dtype="<i8")
        return np.array(self._bounds, dtype="<i8")

    def _index_parts(self) -> Iterator[bytes]:
        lengths, bounds = self._written_lengths(), self._written_bounds()
        header = index_header(self._dtype, len(lengths), len(bounds))
        return index_parts(header, self._dtype.itemsize, lambda: iter((lengths,)), iter((bounds,)))


def index_header(dtype: np.dtype[Any], num_sequences: int, num_document_bounds: int) -> bytes:
    """The first bytes of ``.idx``."""
    code = next(code for code, each in (INTEGER_CODES | _FLOAT_CODES).items() if each == dtype)
    return MMAP_MAGIC + struct.pack("<QBQQ", 1, code, num_sequences, num_document_bounds)


def index_parts(
    header: bytes,
    itemsize: int,
    lengths: Callable[[], Iterator[NDArray[Any]]],
    bounds: Iterator[NDArray[np.int64]],
) -> Iterator[bytes]:
    """The bytes of ``.idx``.

    Args:
        header: What ``index_header`` gave.
        itemsize: Bytes of a token.
        lengths: Gives the lengths of the sequences in chunks, each time from the first; none exceeds int32.
        bounds: The document bounds in chunks.
    """
    yield header
    for chunk in lengths():
        yield chunk.astype("<i4").tobytes()
    begin = 0
    for chunk in lengths():
        ends = begin + np.cumsum(chunk, dtype="<i8")
        yield ((ends - chunk) * itemsize).tobytes()
        begin = int(ends[-1]) if len(ends) else begin
    for chunk in bounds:
        yield chunk.astype("<i8").tobytes()


_AGAIN = "run preprocess again"


def conversion_command(prefix: str) -> str:
    """What to type to get the legacy dataset at ``prefix`` in this format."""
    return "lightning-megatron convert-dataset " + shlex.join(["--input", prefix, "--output-prefix", f"{prefix}_mmap"])


def _require_magic(idx_path: Path, head: bytes) -> None:
    if head[:9] == MMAP_MAGIC:
        return
    if head[:8] == LEGACY_MAGIC:
        raise DataError(
            f"{idx_path} is in Megatron's old cached/lazy format (TNTIDX), only mmap (MMIDIDX) is read; run:"
            f" {conversion_command(str(idx_path.with_suffix('')))}"
        )
    if MMAP_MAGIC.startswith(head):
        raise DataError(f"{idx_path} ends within its first {len(MMAP_MAGIC)} bytes: truncated; {_AGAIN}")
    raise DataError(f"{idx_path} begins with {head[:9]!r}, an index begins with {MMAP_MAGIC!r}: foreign file; {_AGAIN}")


def _lengths(header: IndexHeader) -> Iterator[NDArray[np.int32]]:
    return read_chunks(Path(header.prefix + ".idx"), "<i4", header.num_sequences, HEADER_BYTES)


def _positions(header: IndexHeader) -> Iterator[NDArray[np.int64]]:
    return read_chunks(
        Path(header.prefix + ".idx"), "<i8", header.num_sequences, HEADER_BYTES + 4 * header.num_sequences
    )
