r"""Read the index of Megatron 1.x and 2.x datasets, ``--data-impl cached`` or ``lazy``, also those of fairseq.

The two names are two ways to read the same pair ``PREFIX.bin`` and ``PREFIX.idx``. Layout, little endian.
``.bin``: all tokens one after the other.
``.idx``: 8 bytes ``TNTIDX\0\0``; u64 version 1; u64 type of a token; u64 element size; u64 N sequences; u64 S; u64 D;
int64[N+1] where each sequence's axes begin among the S; int64[N+1] where its tokens begin in ``.bin``, in elements;
int64[S] length of each axis; int64[D] the first sequence of each document and, last, N. A sequence of tokens has one
axis, so S = N.

Files of fairseq, and of Megatron before November 2019, have neither D nor the array of D: there an empty sequence ends
a document (Megatron's ``create_doc_idx``). It remains part of the document here. If no sequence is empty, nothing says
where documents end, and each sequence is taken for one.

Types 6 and 7 changed their meaning; the element size tells which it is. Until 2022, 6 was Python's float, stored as 8
bytes though its element size was said to be 4 (positions count 4 bytes then), and 7 was float64. Since 2023, 6 is
float64 and 7 is float32.
Source: Megatron-LM at 0058b1a5, megatron/data/indexed_dataset.py:IndexedDataset.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

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
from lightning_megatron.errors import DataError

HEADER_BYTES = 56

_HEADER_BYTES_WITHOUT_DOCUMENTS = 48
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(code, dtype.itemsize): dtype for code, dtype in INTEGER_CODES.items()},
    (6, 4): np.dtype("<f8"),
    (6, 8): np.dtype("<f8"),
    (7, 4): np.dtype("<f4"),
    (7, 8): np.dtype("<f8"),
}
"""Type of a token by its number and element size."""
_FIX = "copy both files again from their source"
_FIX_OF_BOUNDS = f"{_FIX}, or preprocess the text again if Megatron merged them: some versions lost the documents"


@dataclass(frozen=True, kw_only=True)
class LegacyHeader(DatasetHeader):
    """What the first bytes of a valid ``.idx`` of this format say; its size agrees with them."""

    format: ClassVar[str] = "cached/lazy"

    element_size: int
    """Bytes in which ``.idx`` counts positions; not always those of a token."""
    num_empty: int | None = None
    """Empty sequences, which end documents where ``.idx`` does not say where they end; None where it does."""

    @property
    def remark(self) -> str | None:
        """How documents were found that ``.idx`` does not name."""
        if self.num_empty is None:
            return None
        found = "an empty sequence ends a document" if self.num_empty else "each sequence is taken for a document"
        return (
            f"{self.prefix}.idx names no documents (fairseq, or Megatron before November 2019): {found};"
            " fairseq itself stored every token one too high"
        )

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Tokens of each sequence, in chunks."""
        return self._array(self.num_sequences, 16 * (self.num_sequences + 1))

    def document_bounds(self) -> Iterator[NDArray[np.int64]]:
        """First sequence of each document and, last, N, in chunks."""
        if self.num_empty is None:
            return self._array(self.num_document_bounds, 16 * (self.num_sequences + 1) + 8 * self.num_sequences)
        return self._bounds_by_empty_sequences()

    def axis_offsets(self) -> Iterator[NDArray[np.int64]]:
        """Where the axes of each sequence begin, and S, in chunks."""
        return self._array(self.num_sequences + 1, 0)

    def positions(self, first: int, count: int) -> Iterator[NDArray[np.int64]]:
        """Where sequences begin, in elements, from the sequence ``first`` on, in chunks; number N is the end."""
        return self._array(count, 8 * (self.num_sequences + 1) + 8 * first)

    def _array(self, count: int, offset: int) -> Iterator[NDArray[np.int64]]:
        begin = HEADER_BYTES if self.num_empty is None else _HEADER_BYTES_WITHOUT_DOCUMENTS
        return read_chunks(Path(self.prefix + ".idx"), "<i8", count, begin + offset)

    def _bounds_by_empty_sequences(self) -> Iterator[NDArray[np.int64]]:
        yield np.zeros(1, dtype=np.int64)
        begin = last = 0
        for lengths in self.lengths():
            ends = begin + 1 + np.flatnonzero((lengths == 0) | (self.num_empty == 0))
            begin += len(lengths)
            if len(ends):
                last = int(ends[-1])
                yield ends
        if last < self.num_sequences:
            yield np.array([self.num_sequences])


def read_legacy_header(prefix: str, *, option: str = "input") -> LegacyHeader:
    """The header of the dataset at ``prefix``, after checks that touch only a few bytes of the files.

    Where the ``.idx`` names no documents, the lengths are read to count them.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.

    Raises:
        DataError: If a file is missing or is not of this format, or the ``.idx`` has not the size that it announces.
    """
    idx_path, _ = existing_pair(prefix, option)
    size = idx_path.stat().st_size
    head = first_bytes(idx_path, HEADER_BYTES)
    _require_magic(idx_path, head)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{idx_path} has {size} bytes, its header alone needs {HEADER_BYTES}: truncated; {_FIX}")
    version, code, element_size, num_sequences, num_axes, num_bounds = struct.unpack("<QQQQQQ", head[8:])
    if version != 1:
        raise DataError(f"{idx_path} says version {version}, the only version is 1: damaged or foreign; {_FIX}")
    if (code, element_size) not in _DTYPES:
        known = ", ".join(f"{number} of {width}" for number, width in sorted(_DTYPES))
        raise DataError(
            f"{idx_path} says token type {code} of {element_size} bytes, there are {known}: damaged or foreign; {_FIX}"
        )
    without_documents = _HEADER_BYTES_WITHOUT_DOCUMENTS + 8 * (2 * (num_sequences + 1) + num_axes)
    expected = without_documents + 8 * (1 + num_bounds)
    if size not in (without_documents, expected):
        raise DataError(
            f"{idx_path} has {size} bytes, {num_sequences} sequences, {num_axes} axes and {num_bounds} document bounds"
            f" need {expected}: truncated or damaged; {_FIX}"
        )
    if num_sequences == 0:
        raise DataError(f"{idx_path} holds no sequence; give a dataset of text")
    if num_axes != num_sequences:
        raise DataError(
            f"{idx_path} has {num_axes} axes for {num_sequences} sequences, sequences of tokens have one each: it holds"
            " something other than text; give a dataset of text"
        )
    header = LegacyHeader(
        prefix=prefix,
        dtype=_DTYPES[code, element_size],
        element_size=element_size,
        num_sequences=num_sequences,
        num_document_bounds=num_bounds,
    )
    return header if size == expected else _with_documents_that_empty_sequences_end(header)


def check_legacy_dataset(prefix: str, *, option: str = "input") -> LegacyHeader:
    """The header of the dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Arguments are those of ``read_legacy_header``.

    Raises:
        DataError: Also if a length is negative, positions do not follow from the lengths, the files do not belong
            together, or the documents are not in order.
    """
    header = read_legacy_header(prefix, option=option)
    idx_path, bin_path = existing_pair(prefix, option)
    bin_bytes = bin_path.stat().st_size
    _check_axes(header, idx_path)
    end = _check_positions(header, idx_path, bin_bytes)
    if end != bin_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, {idx_path.name} accounts for {end}: the two files do not belong"
            f" together; {_FIX}"
        )
    check_document_bounds(header.document_bounds(), header.num_sequences, idx_path, _FIX_OF_BOUNDS)
    return header


def _with_documents_that_empty_sequences_end(header: LegacyHeader) -> LegacyHeader:
    header = dataclasses.replace(header, num_empty=0)  # its arrays begin where they do without D
    num_empty = last = 0
    for lengths in header.lengths():
        num_empty += int((lengths == 0).sum())
        last = int(lengths[-1])
    # The sequences after the last empty one are a document too.
    num_documents = num_empty + (last != 0) if num_empty else header.num_sequences
    return dataclasses.replace(header, num_empty=num_empty, num_document_bounds=num_documents + 1)


def _require_magic(idx_path: Path, head: bytes) -> None:
    if head.startswith(LEGACY_MAGIC):
        return
    if head.startswith(MMAP_MAGIC):
        raise DataError(f"{idx_path} is in the mmap format (MMIDIDX) already; use the dataset as it is")
    if LEGACY_MAGIC.startswith(head):
        raise DataError(f"{idx_path} ends within its first {len(LEGACY_MAGIC)} bytes: truncated; {_FIX}")
    raise DataError(
        f"{idx_path} begins with {head[:8]!r}, a cached/lazy index begins with {LEGACY_MAGIC!r}: foreign file; give the"
        " prefix of a dataset of Megatron 1.x or 2.x"
    )


def _check_axes(header: LegacyHeader, idx_path: Path) -> None:
    begin = 0
    for chunk in header.axis_offsets():
        if (chunk != np.arange(begin, begin + len(chunk))).any():
            raise DataError(f"{idx_path} has sequences of other than one axis: damaged, or not of text; {_FIX}")
        begin += len(chunk)


def _check_positions(header: LegacyHeader, idx_path: Path, bin_bytes: int) -> int:
    """Every sequence begins where the one before ends; the bytes of all of them."""
    elements = bin_bytes // header.element_size
    elements_of_a_token = header.dtype.itemsize // header.element_size
    end = 0
    if next(header.positions(0, 1))[0] != 0:
        raise DataError(f"{idx_path} does not begin with the first token of .bin: damaged; {_FIX}")
    ends = header.positions(1, header.num_sequences)
    for lengths, positions in zip(header.lengths(), ends, strict=True):
        # Bounds first, so that nothing below overflows: a damaged number may be any of 64 bits.
        for numbers, what in ((lengths, "a sequence of {} tokens"), (positions, "a sequence that ends at element {}")):
            outside = (numbers < 0) | (numbers > elements)
            if outside.any():
                raise DataError(
                    f"{idx_path} has {what.format(numbers[int(outside.argmax())])}, .bin has {elements} elements:"
                    f" damaged, .bin is truncated or belongs to another .idx; {_FIX}"
                )
        distances = np.diff(positions, prepend=end)
        wrong = distances != lengths * elements_of_a_token
        if wrong.any():
            worst = int(wrong.argmax())
            raise DataError(
                f"{idx_path} has a sequence of {lengths[worst]} tokens of {header.dtype.itemsize} bytes in"
                f" {distances[worst]} elements of {header.element_size}: damaged; {_FIX}"
            )
        end = int(positions[-1])
    return end * header.element_size
