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

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import (
    INTEGER_TYPES,
    MAGIC,
    OLD_MAGIC,
    IndexedDataset,
    check_index,
    cut_index,
    map_index,
    require_header,
)
from lightning_megatron.errors import DataError

_HEADER_BYTES = 56
_HEADER_BYTES_WITHOUT_DOCUMENTS = 48
_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(code, dtype.itemsize): dtype for code, dtype in INTEGER_TYPES.items()},
    (6, 4): np.dtype("<f8"),
    (6, 8): np.dtype("<f8"),
    (7, 4): np.dtype("<f4"),
    (7, 8): np.dtype("<f8"),
}
"""Type of a token by its number and element size."""
_FIX = "copy both files again from their source, or preprocess the text again: some versions of Megatron damaged merges"


def check_old_dataset(prefix: str, *, option: str = "input") -> IndexedDataset:
    """The dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.

    Raises:
        DataError: If a file is missing, is not of this format, or is damaged.
    """
    index, path = map_index(prefix, option), f"{prefix}.idx"
    code, element_size, num_sequences, num_bounds = _read_header(path, index)
    sizes = (num_sequences + 1, num_sequences + 1, num_sequences, num_bounds or 0)
    begin = _HEADER_BYTES_WITHOUT_DOCUMENTS if num_bounds is None else _HEADER_BYTES
    axes, positions, lengths, bounds = cut_index(index, begin, [("<i8", count) for count in sizes])
    if (np.diff(axes) != 1).any() or axes[0] != 0:
        raise DataError(f"{path} has sequences of other than one axis: damaged, or not of text; {_FIX}")
    note = None
    if num_bounds is None:
        bounds, found = _bounds_by_empty_sequences(lengths)
        note = (
            f"{path} names no documents (fairseq, or Megatron before November 2019): {found};"
            " fairseq itself stored every token one too high"
        )
    dataset = IndexedDataset(
        prefix=prefix,
        format="cached/lazy",
        dtype=_TYPES[code, element_size],
        lengths=lengths,
        positions=positions[:-1],
        document_bounds=bounds,
        modes=np.empty(0, np.int8),
        position_bytes=element_size,
        note=note,
    )
    check_index(dataset, _FIX)
    if int(positions[-1]) * element_size != dataset.bin_bytes:
        raise DataError(f"{path} ends at element {positions[-1]}, and .bin elsewhere: damaged; {_FIX}")
    return dataset


def _read_header(path: str, index: NDArray[np.uint8]) -> tuple[int, int, int, int | None]:
    """Type and element size of a token, N, and D; None for D if the index names no documents."""
    size, head = len(index), index[:_HEADER_BYTES].tobytes()
    if head.startswith(MAGIC):
        raise DataError(f"{path} is in the mmap format (MMIDIDX) already; use the dataset as it is")
    require_header(path, index, OLD_MAGIC, _HEADER_BYTES, _FIX)
    version, code, element_size, num_sequences, num_axes, num_bounds = struct.unpack("<6Q", head[len(OLD_MAGIC) :])
    if version != 1:
        raise DataError(f"{path} says version {version}, the only version is 1: damaged or foreign; {_FIX}")
    if (code, element_size) not in _TYPES:
        known = ", ".join(f"{number} of {width}" for number, width in sorted(_TYPES))
        raise DataError(
            f"{path} says token type {code} of {element_size} bytes, there are {known}: damaged or foreign; {_FIX}"
        )
    without_documents = _HEADER_BYTES_WITHOUT_DOCUMENTS + 8 * (2 * (num_sequences + 1) + num_axes)
    expected = without_documents + 8 * (1 + num_bounds)
    if size not in (without_documents, expected):
        raise DataError(
            f"{path} has {size} bytes, {num_sequences} sequences, {num_axes} axes and {num_bounds} document bounds"
            f" need {expected}: truncated or damaged; {_FIX}"
        )
    if num_sequences == 0:
        raise DataError(f"{path} holds no sequence; give a dataset of text")
    if num_axes != num_sequences:
        raise DataError(
            f"{path} has {num_axes} axes for {num_sequences} sequences, sequences of tokens have one each: it holds"
            " something other than text; give a dataset of text"
        )
    return code, element_size, num_sequences, num_bounds if size == expected else None


def _bounds_by_empty_sequences(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], str]:
    """Where documents begin, with the end of the last; and how that was found, in words."""
    ends = np.flatnonzero(lengths == 0) + 1
    if not len(ends):
        return np.arange(len(lengths) + 1), "each sequence is taken for a document"
    last = () if ends[-1] == len(lengths) else (len(lengths),)
    return np.array([0, *ends, *last]), "an empty sequence ends a document"
