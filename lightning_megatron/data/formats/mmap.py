r"""How are tokens stored on disk: Megatron's indexed dataset, a pair ``PREFIX.bin`` and ``PREFIX.idx`` ("mmap")?

Layout, little endian. ``.bin``: all tokens one after the other. ``.idx``: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8
type of a token; u64 N sequences; u64 D; int32[N] lengths in tokens; int64[N] positions in bytes; int64[D] the first
sequence of each document and, last, N; optionally int8[N] modes. For GPT a document is one sequence, so D = N + 1.

Type 6 is float64. Type 7 was float64 until 2022 and is float32 since; the size of ``.bin`` tells which it is.

The writer produces these bytes itself: the engine's builder would cost the import of torch, and leaves half-written
files under the final names when it is interrupted. The reader checks what the engine maps into memory unseen.
Source: megatron-core 0.16.1, datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
"""

from __future__ import annotations

import dataclasses
import shlex
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats import index_files
from lightning_megatron.data.formats.index_files import (
    INTEGER_CODES,
    LEGACY_MAGIC,
    MMAP_MAGIC,
    DatasetHeader,
    check_document_bounds,
    existing_pair,
    first_bytes,
    read_chunks,
)
from lightning_megatron.data.formats.staged import StagedPair
from lightning_megatron.errors import DataError

HEADER_BYTES = 34
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this are stored as uint16, larger ones as int32: Megatron's rule (``DType.optimal_dtype``)."""

_CODES = INTEGER_CODES | {6: np.dtype("<f8"), 7: np.dtype("<f4")}
_TYPE_7_UNTIL_2022 = np.dtype("<f8")


@dataclass(frozen=True, kw_only=True)
class IndexHeader(DatasetHeader):
    """What the first bytes of a valid ``.idx`` of this format say; its size agrees with them."""

    format: ClassVar[str] = "mmap"

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Tokens of each sequence, in chunks."""
        return self._array("<i4", self.num_sequences, 0)

    def positions(self) -> Iterator[NDArray[np.int64]]:
        """Where each sequence begins, in bytes, in chunks."""
        return self._array("<i8", self.num_sequences, 4 * self.num_sequences)

    def document_bounds(self) -> Iterator[NDArray[np.int64]]:
        """First sequence of each document and, last, N, in chunks."""
        return self._array("<i8", self.num_document_bounds, 12 * self.num_sequences)

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Mode of each sequence, in chunks; none if the dataset has no modes."""
        count = self.num_sequences if self.has_modes else 0
        return self._array("i1", count, 12 * self.num_sequences + 8 * self.num_document_bounds)

    def _array(self, dtype: str, count: int, offset: int) -> Iterator[NDArray[Any]]:
        return read_chunks(Path(self.prefix + ".idx"), dtype, count, HEADER_BYTES + offset)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def read_header(prefix: str, *, option: str = "data_path", integers_only: bool = True) -> IndexHeader:
    """The header of the dataset at ``prefix``, after checks that touch only a few bytes of the files.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.
        integers_only: Refuse what nothing can be trained on. If False, lengths may be read to tell float types apart.

    Raises:
        DataError: If a file is missing or is not of this format, or the ``.idx`` has not the size that it announces.
    """
    idx_path, _ = existing_pair(prefix, option)
    size = idx_path.stat().st_size
    head = first_bytes(idx_path, HEADER_BYTES)
    _require_magic(idx_path, head)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{idx_path} has {size} bytes, its header alone needs {HEADER_BYTES}: truncated; {_AGAIN}")
    version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[9:])
    if version != 1:
        raise DataError(f"{idx_path} says version {version}, the only version is 1: damaged or foreign; {_AGAIN}")
    if code not in (INTEGER_CODES if integers_only else _CODES):
        kind = "floating-point tokens" if code in _CODES else "an unknown token type"
        raise DataError(f"{idx_path} says token type {code} ({kind}), tokens are integers (1-5, 8); {_AGAIN}")
    expected = HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if size not in (expected, expected + num_sequences):
        raise DataError(
            f"{idx_path} has {size} bytes, {num_sequences} sequences and {num_bounds} document bounds need {expected}:"
            f" truncated or damaged; {_AGAIN}"
        )
    if num_sequences == 0:
        raise DataError(f"{idx_path} holds no sequence; preprocess inputs that contain text into {prefix}")
    header = IndexHeader(
        prefix=prefix,
        dtype=_CODES[code],
        num_sequences=num_sequences,
        num_document_bounds=num_bounds,
        has_modes=size != expected,
    )
    return _with_the_type_that_fits(header) if code == 7 else header


def check_dataset(prefix: str, *, option: str = "data_path", integers_only: bool = True) -> IndexHeader:
    """The header of the dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Arguments are those of ``read_header``.

    Raises:
        DataError: Also if a length is negative, a sequence does not begin where the one before ends, the files do not
            belong together, or the documents are not in order.
    """
    header = read_header(prefix, option=option, integers_only=integers_only)
    idx_path, bin_path = existing_pair(prefix, option)
    bin_bytes = bin_path.stat().st_size
    end = 0
    for lengths, positions in zip(header.lengths(), header.positions(), strict=True):
        if lengths.min() < 0:
            raise DataError(f"{idx_path} has a sequence of {lengths.min()} tokens: damaged; {_AGAIN}")
        num_bytes = lengths.astype(np.int64) * header.dtype.itemsize
        # Bounds that cannot overflow: a damaged position may be any 64-bit number.
        outside = (positions < 0) | (positions > bin_bytes - num_bytes)
        if outside.any():
            raise DataError(
                f"{bin_path} has {bin_bytes} bytes, {idx_path.name} points outside it (position"
                f" {positions[int(outside.argmax())]}): .bin is truncated or belongs to another .idx; {_AGAIN}"
            )
        # The engine reads neighbours in one piece, so they must be neighbours in .bin too.
        begins = end + np.cumsum(num_bytes) - num_bytes
        wrong = positions != begins
        if wrong.any():
            worst = int(wrong.argmax())
            raise DataError(
                f"{idx_path} has a sequence at position {positions[worst]}, the lengths before it add up to"
                f" {begins[worst]}: damaged; {_AGAIN}"
            )
        end = int(begins[-1] + num_bytes[-1])
    if end != bin_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, {idx_path.name} accounts for {end}: the two files do not belong"
            f" together; {_AGAIN}"
        )
    if end == 0 and integers_only:  # the engine cannot map an empty file
        raise DataError(f"{prefix} holds no token; preprocess inputs that contain text into it")
    check_document_bounds(header.document_bounds(), header.num_sequences, idx_path, _AGAIN)
    return header


def read_lengths(header: IndexHeader) -> NDArray[np.int32]:
    """Tokens of each sequence: [N], int32, read into memory so that no file stays open."""
    return np.concatenate(list(header.lengths()))


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

    def _num_bounds(self) -> int:
        return self.num_documents + 1

    def _written_lengths(self) -> Iterator[NDArray[np.int32]]:
        return _slices(np.frombuffer(self._lengths, dtype=np.int32))

    def _written_bounds(self) -> Iterator[NDArray[np.int64]]:
        if self._bounds is not None:
            return _slices(np.frombuffer(self._bounds, dtype=np.int64))
        return (
            np.arange(begin, min(begin + index_files.CHUNK, self._num_bounds()))
            for begin in range(0, self._num_bounds(), index_files.CHUNK)
        )

    def _index_parts(self) -> Iterator[bytes]:
        header = index_header(self._dtype, len(self._lengths), self._num_bounds())
        return index_parts(header, self._dtype.itemsize, self._written_lengths, self._written_bounds())


def index_header(dtype: np.dtype[Any], num_sequences: int, num_document_bounds: int) -> bytes:
    """The first bytes of ``.idx``."""
    code = next(code for code, each in _CODES.items() if each == dtype)
    return MMAP_MAGIC + struct.pack("<QBQQ", 1, code, num_sequences, num_document_bounds)


def index_parts(
    header: bytes,
    itemsize: int,
    lengths: Callable[[], Iterator[NDArray[Any]]],
    bounds: Iterator[NDArray[np.int64]],
    modes: Iterable[NDArray[np.int8]] = (),
) -> Iterator[bytes]:
    """The bytes of ``.idx``.

    Args:
        header: What ``index_header`` gave.
        itemsize: Bytes of a token.
        lengths: Gives the lengths of the sequences in chunks, each time from the first; none exceeds int32.
        bounds: The document bounds in chunks.
        modes: The modes of the sequences in chunks, if they have any.
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
    for chunk in modes:
        yield chunk.tobytes()


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


def _with_the_type_that_fits(header: IndexHeader) -> IndexHeader:
    num_tokens = sum(int(chunk.sum(dtype=np.int64)) for chunk in header.lengths())
    was_float64 = num_tokens > 0 and num_tokens * _TYPE_7_UNTIL_2022.itemsize == header.bin_bytes
    return dataclasses.replace(header, dtype=_TYPE_7_UNTIL_2022) if was_float64 else header


def _slices(numbers: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (numbers[begin : begin + index_files.CHUNK] for begin in range(0, len(numbers), index_files.CHUNK))
