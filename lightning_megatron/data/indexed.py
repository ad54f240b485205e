r"""Read and check Megatron's indexed datasets: ``PREFIX.bin`` (tokens), ``PREFIX.idx`` (index).

``.bin``: the tokens of all sequences, concatenated. ``.idx``, little-endian, in one of two formats:

* mmap: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8 token type; u64 N sequences; u64 D; int32[N] lengths in tokens;
  int64[N] byte offsets in ``.bin``; int64[D] the first sequence of each document and, last, N. For GPT a document is
  one sequence, so D = N + 1; multimodal datasets, which are refused, append int8[N] modes. Type 6 is float64; type 7
  was float64 until 2022 and is float32 since: the size of ``.bin`` tells which. Source: megatron-core 0.16.1,
  datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
* cached/lazy, of Megatron 1.x and 2.x, which can be read but not written: 8 bytes ``TNTIDX\0\0``; u64 version 1; u64
  token type; u64 element size; u64 N sequences; u64 S; u64 D; int64[N+1] where each sequence's axes begin among the S;
  int64[N+1] where its tokens begin in ``.bin``, in elements; int64[S] length of each axis; int64[D] as above. A
  sequence of tokens has one axis, so S = N. Files of fairseq, and of Megatron before November 2019, lack D and its
  array: an empty sequence ends a document (Megatron's ``create_doc_idx``) and remains part of it here; if no sequence
  is empty, each is a document. Until 2022 type 6 was Python's float, stored as 8 bytes with an element size of 4 in the
  header (offsets count 4 bytes then), and 7 was float64; since 2023, 6 is float64 and 7 is float32. Source: Megatron-LM
  at 0058b1a5, megatron/data/indexed_dataset.py.

The engine's ``IndexedDataset`` is not used. It fails assertions on damaged files, takes 19 us to read 20 consecutive
sentences (2 us here), cannot gather the pieces of a batch at once, and closes its memory maps when it is collected, so
that arrays which outlive it crash the process. It imports torch, which ``inspect`` does not need.
"""

from __future__ import annotations

import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this size are stored as uint16, others as int32: Megatron's rule (``DType.optimal_dtype``)."""
CHUNK = 1 << 18
"""Index elements checked at a time: the index of a billion documents has 20 GB."""

TOKEN_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Token dtypes by their code in ``.idx``."""
_OLD_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(code, dtype.itemsize): dtype for code, dtype in TOKEN_TYPES.items()},
    (6, 4): np.dtype("<f8"),
    (7, 8): np.dtype("<f8"),
}
"""Token dtypes by their code and element size in the old format."""
_FIX = "run preprocess again, or copy both files again from their source"


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A memory-mapped dataset: pages are read on first access and shared by all processes."""

    prefix: str
    """Path of both files without suffix."""
    format: str
    """Megatron's name of the format of ``.idx``: ``mmap`` or ``cached/lazy``."""
    dtype: np.dtype[Any]
    """Token dtype."""
    lengths: NDArray[np.int32]
    """Tokens of each sequence: [N]."""
    positions: NDArray[np.int64]
    """Byte offset of each sequence in ``.bin``: [N]."""
    document_bounds: NDArray[np.int64]
    """The first sequence of each document and, last, N: [documents + 1]."""
    files: dict[str, mmap.mmap]
    """Memory maps of both files, by suffix."""

    def __post_init__(self) -> None:
        """Check that ``.bin`` ends where its last sequence does.

        Raises:
            DataError: If it does not: it was truncated or replaced.
        """
        size = len(self.files[".bin"])
        width = self.dtype.itemsize
        end = int(self.positions[-1]) + int(self.lengths[-1]) * width
        if size != end or size % width:
            raise _damaged(self.prefix, f"accounts for {end} bytes, and .bin has {size}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the prefix: other processes open the dataset again, as memory maps cannot be pickled."""
        return open_dataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return len(self.document_bounds) - 1

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """The tokens of all sequences, concatenated."""
        return np.frombuffer(self.files[".bin"], self.dtype)

    def sequences(
        self,
        begin: int,
        end: int,
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens of the sequences from ``begin`` to ``end - 1``, at least one, and the length of each."""
        lengths = self.lengths[begin:end]
        first = int(self.positions[begin]) // self.dtype.itemsize
        num_tokens = int(lengths.sum(dtype=np.int64))
        return self.tokens[first : first + num_tokens], lengths


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Dtype in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def open_dataset(
    prefix: str, *, option: str = "data_path", for_training: bool = True
) -> IndexedDataset:
    """Open the dataset at ``prefix`` after checks that read a few bytes of its files; of an old format all of ``.idx``.

    Args:
        prefix: Path of both files without suffix.
        option: Name of the setting that gives ``prefix``, for messages.
        for_training: Refuse tokens that are not integers.

    Raises:
        DataError: If a file is missing, empty or of another format, or ``.idx`` has another size than its header says.
    """
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"{option}={prefix}: expected a prefix, got a file; write {prefix[:-4]}")
    paths = [f"{prefix}.idx", f"{prefix}.bin"]
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    files = {suffix: _map_file(prefix + suffix) for suffix in (".idx", ".bin")}
    if files[".idx"][: len(OLD_MAGIC)] == OLD_MAGIC:
        dataset = IndexedDataset(prefix, "cached/lazy", *_read_old(prefix, files), files)
    else:
        dataset = IndexedDataset(prefix, "mmap", *_read_mmap(prefix, files), files)
    if for_training and dataset.dtype.kind == "f":
        raise DataError(
            f"{prefix} holds {dataset.dtype}: expected integers, on which a model can be trained"
        )
    return dataset


def check_dataset(
    prefix: str, *, option: str = "data_path", for_training: bool = True
) -> IndexedDataset:
    """Open the dataset at ``prefix`` after checking all of its ``.idx``, and nothing of ``.bin``.

    Arguments are those of ``open_dataset``.

    Raises:
        DataError: Also if a length is negative, a sequence does not begin where the previous one ends, the files do not
            belong together, or the documents are not in order.
    """
    dataset = open_dataset(prefix, option=option, for_training=for_training)
    num_sequences = len(dataset.lengths)
    end = 0
    for begin in range(0, num_sequences, CHUNK):
        lengths = dataset.lengths[begin : begin + CHUNK].astype(np.int64)
        positions = dataset.positions[begin : begin + CHUNK]
        sizes = lengths * dataset.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if (sizes < 0).any() or (positions != ends - sizes).any():
            raise _damaged(prefix, "has a sequence that does not begin where the previous one ends")
        end = int(ends[-1])
    bounds = dataset.document_bounds
    # Compared, not subtracted, which may overflow: damaged bounds can be any 64-bit integers.
    descends = (bounds[1:] < bounds[:-1]).any()
    if descends or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise _damaged(
            prefix,
            f"has document bounds that do not ascend from 0 to the {num_sequences} sequences",
        )
    return dataset


_Files: TypeAlias = dict[str, mmap.mmap]
_Index: TypeAlias = tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Token dtype, lengths, positions and document bounds, as in ``IndexedDataset``."""


def _read_mmap(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, num_sequences, num_bounds = _read_header(prefix, index, MAGIC, "<QBQQ")
    if code not in TOKEN_TYPES:
        known = ", ".join(map(str, TOKEN_TYPES))
        raise _damaged(prefix, f"has token type {code}, expected one of {known}")
    layout = [
        ("<i4", num_sequences),
        ("<i8", num_sequences),
        ("<i8", num_bounds),
    ]
    lengths, positions, bounds = _split(prefix, index, 34, layout)
    dtype = TOKEN_TYPES[code]
    num_tokens = int(lengths.sum(dtype=np.int64))
    if code == 7 and num_tokens > 0 and 8 * num_tokens == len(files[".bin"]):
        dtype = np.dtype("<f8")
    return dtype, lengths, positions, bounds


def _read_old(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, element_size, num_sequences, num_axes, num_bounds = _read_header(
        prefix, index, OLD_MAGIC, "<6Q"
    )
    if (code, element_size) not in _OLD_TYPES:
        known = ", ".join(f"{other} of {width}" for other, width in sorted(_OLD_TYPES))
        raise _damaged(prefix, f"has token type {code} of {element_size} bytes, expected {known}")
    layout = [
        ("<i8", num_sequences + 1),
        ("<i8", num_sequences + 1),
        ("<i8", num_axes),
    ]
    if len(index) == 64 + 16 * num_sequences + 8 * num_axes:  # without D and its array
        axes, elements, lengths = _split(prefix, index, 48, layout)
        bounds = _infer_document_bounds(prefix, lengths)
    else:
        layout.append(("<i8", num_bounds))
        axes, elements, lengths, bounds = _split(prefix, index, 56, layout)
    if num_axes != num_sequences or (axes != np.arange(len(axes))).any():
        raise _damaged(prefix, "has sequences of other than one axis, so it is not of text")
    dtype = _OLD_TYPES[code, element_size]
    ends = np.cumsum(lengths)
    as_int32 = lengths.astype(np.int32)
    expected = ends * (dtype.itemsize // element_size)
    if elements[0] or (elements[1:] != expected).any() or (as_int32 != lengths).any():
        raise _damaged(prefix, "has a sequence that does not begin where the previous one ends")
    return dtype, as_int32, (ends - lengths) * dtype.itemsize, bounds


def _infer_document_bounds(prefix: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.flatnonzero(lengths == 0) + 1
    if len(ends):
        rule = "an empty sequence ends a document"
        bounds = np.unique([0, *ends, len(lengths)])
    else:
        rule = "each sequence is taken for a document"
        bounds = np.arange(len(lengths) + 1)
    warnings.warn(
        f"{prefix}.idx has no document index (fairseq, or Megatron before November 2019): {rule}; fairseq itself "
        "stored every token one too high",
        stacklevel=2,
    )
    return bounds


def _read_header(
    prefix: str, index: NDArray[np.uint8], magic: bytes, fields: str
) -> tuple[int, ...]:
    """Header fields after magic number and version."""
    size = len(magic) + struct.calcsize(fields)
    head = index[:size].tobytes()
    if len(head) < size or not head.startswith(magic):
        raise _damaged(prefix, f"begins with {head[:9]!r} and has {len(index)} bytes")
    version, *values = struct.unpack(fields, head[len(magic) :])
    if version != 1:
        raise _damaged(prefix, f"has version {version}, expected 1")
    return tuple(values)


def _split(
    prefix: str,
    index: NDArray[np.uint8],
    begin: int,
    layout: Sequence[tuple[str, int]],
) -> list[NDArray[Any]]:
    """Consecutive arrays from the byte ``begin`` to the end of the index, as views."""
    sizes = [np.dtype(dtype).itemsize * count for dtype, count in layout]
    end = begin + sum(sizes)
    counts = [count for _, count in layout]
    if len(index) != end:
        listed = ", ".join(map(str, counts))
        raise _damaged(prefix, f"has {len(index)} bytes, arrays of {listed} elements need {end}")
    if not all(counts):
        raise DataError(
            f"{prefix}.idx holds no sequence; preprocess inputs that contain text into {prefix}"
        )
    arrays = []
    for (dtype, _), size in zip(layout, sizes, strict=True):
        arrays.append(index[begin : begin + size].view(dtype))
        begin += size
    return arrays


def _damaged(prefix: str, problem: str) -> DataError:
    return DataError(f"{prefix}.idx {problem}: damaged, truncated or foreign; {_FIX}")


def _map_file(path: str) -> mmap.mmap:
    """Memory-map a file; the map's ``size()`` is the current size of the file."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: empty file
        raise DataError(
            f"{path} cannot be read ({error}); make it readable, or create or copy it again"
        ) from error
