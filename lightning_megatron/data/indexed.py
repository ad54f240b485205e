r"""Read, check and write Megatron's indexed datasets: ``PREFIX.bin`` (tokens) and ``PREFIX.idx`` (where they belong).

Layout of the format called mmap, little endian. ``.bin``: all tokens one after the other. ``.idx``: 9 bytes
``MMIDIDX\0\0``; u64 version 1; u8 type of a token; u64 N sequences; u64 D; int32[N] lengths in tokens; int64[N]
positions in bytes; int64[D] the first sequence of each document and, last, N; optionally int8[N] modes. For GPT a
document is one sequence, so D = N + 1. Type 6 is float64; type 7 was float64 until 2022 and is float32 since: the size
of ``.bin`` tells which it is. Source: megatron-core 0.16.1, datasets/indexed_dataset.py:_IndexWriter and _IndexReader.

The engine's ``IndexedDataset`` and ``IndexedDatasetBuilder`` do not serve here. The reader asserts where a file is
damaged, takes 19 us for a run of 20 sentences (2 us here) and cannot gather the pieces of a batch at once, and closes
its maps when it is collected, so that arrays which outlive it end the process. The builder leaves half-written files
under their names when it is interrupted, takes ten times as long and ten times the memory for its lists, and both cost
the import of torch, which neither ``preprocess`` nor ``inspect`` needs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError
from lightning_megatron.files import staged

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
"""What the index of the older formats begins with, which ``old_formats.py`` reads."""
INTEGER_TYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Types of tokens by their number in ``.idx``."""
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this are stored as uint16, larger ones as int32: Megatron's rule (``DType.optimal_dtype``)."""
CHUNK = 1 << 18
"""Elements of an index that are checked at a time: the index of a billion documents has 20 GB."""

_TYPES = INTEGER_TYPES | {6: np.dtype("<f8"), 7: np.dtype("<f4")}
_HEADER_BYTES = 34
_AGAIN = "run preprocess again"


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedDataset:
    """A dataset that is mapped into memory: pages are shared by all processes, and read when they are touched."""

    prefix: str
    """Path of both files without suffix."""
    format: str
    """The name by which Megatron's users know it."""
    dtype: np.dtype[Any]
    """Type of a token."""
    lengths: NDArray[Any]
    """Tokens of each sequence: [N], integers."""
    positions: NDArray[np.int64]
    """Where each sequence begins: [N], in units of ``position_bytes``."""
    document_bounds: NDArray[np.int64]
    """The first sequence of each document and, last, N: [documents + 1]."""
    modes: NDArray[np.int8]
    """Mode of each sequence, as those of multimodal datasets have: [N], or [0] if there are none."""
    position_bytes: int = 1
    """Bytes of one step in ``positions``; 1 in the mmap format."""
    note: str | None = None
    """What whoever uses the dataset should know about the way it was read."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Maps of files do not travel to other processes, which open the dataset again."""
        return open_dataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return len(self.document_bounds) - 1

    @property
    def bin_bytes(self) -> int:
        """Size of ``.bin``."""
        return os.path.getsize(self.prefix + ".bin")

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, one sequence after the other."""
        data = _mapped(self.prefix + ".bin")
        return data[: len(data) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)

    def sequences(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The tokens of consecutive sequences, at least one, and the length of each.

        Raises:
            DataError: If the index points outside of the tokens.
        """
        lengths = self.lengths[begin:end]
        first, odd = divmod(int(self.positions[begin]), self.dtype.itemsize)
        total = int(lengths.sum(dtype=np.int64))
        found = self.tokens[max(first, 0) : first + total]
        if odd or len(found) != total:
            raise DataError(f"{self.prefix}.idx points outside of .bin or between tokens; {_AGAIN}")
        return found, lengths


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def open_dataset(prefix: str, *, option: str = "data_path", integers_only: bool = True) -> IndexedDataset:
    """The dataset at ``prefix``, after checks that touch only a few bytes of the files.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.
        integers_only: Refuse what nothing can be trained on. If False, lengths may be read to tell float types apart.

    Raises:
        DataError: If a file is missing or is not of this format, or the ``.idx`` has not the size that it announces.
    """
    index = map_index(prefix, option)
    head, path = index[:_HEADER_BYTES].tobytes(), f"{prefix}.idx"
    if head.startswith(OLD_MAGIC):
        command = shlex.join(["--input", prefix, "--output-prefix", f"{prefix}_mmap"])
        raise DataError(
            f"{path} is in Megatron's old cached/lazy format (TNTIDX), only mmap (MMIDIDX) is read; run:"
            f" lightning-megatron convert-dataset {command}"
        )
    require_header(path, index, MAGIC, _HEADER_BYTES, _AGAIN)
    version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[len(MAGIC) :])
    if version != 1:
        raise DataError(f"{path} says version {version}, the only version is 1: damaged or foreign; {_AGAIN}")
    if code not in (INTEGER_TYPES if integers_only else _TYPES):
        kind = "floating-point tokens" if code in _TYPES else "an unknown token type"
        raise DataError(f"{path} says token type {code} ({kind}), tokens are integers (1-5, 8); {_AGAIN}")
    expected = _HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    if len(index) not in (expected, expected + num_sequences):
        raise DataError(
            f"{path} has {len(index)} bytes, {num_sequences} sequences and {num_bounds} document bounds need"
            f" {expected}: truncated or damaged; {_AGAIN}"
        )
    if num_sequences == 0:
        raise DataError(f"{path} holds no sequence; preprocess inputs that contain text into {prefix}")
    layout = (("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_bounds), ("i1", len(index) - expected))
    lengths, positions, bounds, modes = cut_index(index, _HEADER_BYTES, layout)
    dtype = _TYPES[code]
    if code == 7 and 0 < 8 * int(lengths.sum(dtype=np.int64)) == os.path.getsize(f"{prefix}.bin"):
        dtype = np.dtype("<f8")
    return IndexedDataset(
        prefix=prefix,
        format="mmap",
        dtype=dtype,
        lengths=lengths,
        positions=positions,
        document_bounds=bounds,
        modes=modes,
    )


def check_dataset(prefix: str, *, option: str = "data_path", integers_only: bool = True) -> IndexedDataset:
    """The dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Arguments are those of ``open_dataset``.

    Raises:
        DataError: Also if a length is negative, a sequence does not begin where the one before ends, the files do not
            belong together, or the documents are not in order.
    """
    dataset = open_dataset(prefix, option=option, integers_only=integers_only)
    check_index(dataset, _AGAIN)
    if integers_only and not len(dataset.tokens):
        raise DataError(f"{prefix} holds no token; preprocess inputs that contain text into it")
    return dataset


def map_index(prefix: str, option: str) -> NDArray[np.uint8]:
    """The bytes of ``PREFIX.idx``, beside which there is a ``PREFIX.bin``.

    Args:
        prefix: What the user gave.
        option: The setting that it was given for.

    Raises:
        DataError: If a file is missing or cannot be read, or ``prefix`` is a file.
    """
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"{option}={prefix} is a file, it must be the prefix; write {prefix[:-4]}")
    missing = [prefix + suffix for suffix in (".idx", ".bin") if not os.path.isfile(prefix + suffix)]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    return _mapped(f"{prefix}.idx")


def require_header(path: str, index: NDArray[np.uint8], magic: bytes, num_bytes: int, fix: str) -> None:
    """Raise a DataError unless an index begins with ``magic`` and has a whole header of ``num_bytes``."""
    head = index[: len(magic)].tobytes()
    if not magic.startswith(head):
        raise DataError(f"{path} begins with {head!r}, such an index begins with {magic!r}: foreign file; {fix}")
    if len(index) < num_bytes:
        raise DataError(f"{path} has {len(index)} bytes, its header alone needs {num_bytes}: truncated; {fix}")


def cut_index(index: NDArray[np.uint8], begin: int, layout: Sequence[tuple[str, int]]) -> list[NDArray[Any]]:
    """The arrays that follow each other in an index from the byte ``begin`` on, each given by its type and length."""
    ends = begin + np.cumsum([np.dtype(dtype).itemsize * count for dtype, count in layout])
    begins = [begin, *ends]
    return [index[a:b].view(dtype) for a, b, (dtype, _) in zip(begins, ends, layout, strict=False)]


def check_index(dataset: IndexedDataset, fix: str) -> None:
    """Sequences follow each other through all of ``.bin``, and documents through all sequences.

    Args:
        dataset: In either format.
        fix: What the user should do about a damaged one.

    Raises:
        DataError: If they do not.
    """
    path, size, end = f"{dataset.prefix}.idx", dataset.bin_bytes, 0
    for begin in range(0, len(dataset.lengths), CHUNK):
        lengths = dataset.lengths[begin : begin + CHUNK].astype(np.int64)
        positions = dataset.positions[begin : begin + CHUNK]
        # Bounds first, so that nothing below overflows: a damaged number may be any of 64 bits.
        for numbers, unit, what in (
            (lengths, dataset.dtype.itemsize, "a sequence of {} tokens"),
            (positions, dataset.position_bytes, "a sequence at position {}"),
        ):
            outside = (numbers < 0) | (numbers > size // unit)
            if outside.any():
                raise DataError(
                    f"{path} has {what.format(numbers[int(outside.argmax())])}, .bin has {size} bytes: damaged, or .bin"
                    f" is truncated or belongs to another .idx; {fix}"
                )
        ends = end + np.cumsum(lengths * dataset.dtype.itemsize)
        begins = ends - lengths * dataset.dtype.itemsize
        wrong = positions * dataset.position_bytes != begins
        if wrong.any():
            worst = int(wrong.argmax())
            raise DataError(
                f"{path} has a sequence at position {positions[worst]}, the lengths before it add up to"
                f" {begins[worst] // dataset.position_bytes}: damaged; {fix}"
            )
        end = int(ends[-1])
    if end != size:
        raise DataError(
            f"{dataset.prefix}.bin has {size} bytes, {os.path.basename(path)} accounts for {end}: .bin is truncated or"
            f" belongs to another .idx; {fix}"
        )
    bounds, last = dataset.document_bounds, len(dataset.lengths)
    chunks = (bounds[begin : begin + CHUNK + 1] for begin in range(0, len(bounds), CHUNK))
    # Compared, not subtracted: damaged bounds may be any 64-bit numbers.
    if len(bounds) == 0 or bounds[0] != 0 or any((chunk[1:] < chunk[:-1]).any() for chunk in chunks):
        raise DataError(f"{path} has document bounds that do not ascend from 0: damaged; {fix}")
    if bounds[-1] != last:
        raise DataError(f"{path} ends its last document at sequence {bounds[-1]} of {last}: damaged; {fix}")


def largest_token_at_the_ends(dataset: IndexedDataset, num_tokens: int = 1 << 20) -> int:
    """The largest id among the first and the last ``num_tokens`` tokens; all of ``.bin`` may be terabytes."""
    ends = (dataset.tokens[:num_tokens], dataset.tokens[-num_tokens:])
    return max((int(tokens.max()) for tokens in ends if tokens.size), default=0)


class IndexedDatasetWriter:
    """Writes one dataset, which appears under its name only when it is complete, whatever ends the process.

    Use as a context manager: leaving it normally publishes the files, leaving it by an exception removes them (see
    ``files.staged``). ``.idx`` appears last, so it vouches for ``.bin``. The context ends in a DataError if nothing can
    be written there, or another process does, or the disk is full.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        """Name what is written.

        Args:
            prefix: Path of both files without suffix; the folder is made if need be.
            dtype: Type of a token.
        """
        self._prefix, self._dtype = Path(prefix), dtype
        self._lengths, self._counts, self._modes = array("i"), array("i"), bytearray()

    def add_documents(
        self,
        tokens: bytes | memoryview,
        lengths: Sequence[int] | NDArray[Any],
        sequences: Sequence[int] | NDArray[Any] | None = None,
        modes: bytes = b"",
    ) -> None:
        """Append documents.

        Args:
            tokens: The tokens of all of them, in the dataset's type.
            lengths: Tokens of each sequence.
            sequences: Sequences of each document; None if every document is one.
            modes: Mode of each sequence, in datasets that have modes.
        """
        self._bin.write(tokens)
        self._lengths.frombytes(np.asarray(lengths, np.intc).tobytes())
        counts = np.ones(len(lengths), np.intc) if sequences is None else np.asarray(sequences, np.intc)
        self._counts.frombytes(counts.tobytes())
        self._modes += modes

    def complete(self) -> None:
        """Bring both files to the disk, under their hidden names; then only renaming is left, which needs no room.

        Leaving the context does it too. Several datasets that belong together are completed one after the other before
        the first appears.
        """
        if self._idx.tell() > 0:
            return  # complete already
        code = next(code for code, dtype in _TYPES.items() if dtype == self._dtype)
        lengths = np.asarray(self._lengths)
        positions = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        bounds = np.cumsum(np.asarray(self._counts), dtype=np.int64)
        self._idx.write(MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds) + 1))
        for part in (lengths, positions, np.zeros(1, np.int64), bounds):
            self._idx.write(part.data)
        self._idx.write(self._modes)
        for stream in (self._bin, self._idx):
            stream.flush()
            os.fsync(stream.fileno())

    def __enter__(self) -> Self:
        name = self._prefix.name
        with contextlib.ExitStack() as stack:
            hidden = stack.enter_context(staged(self._prefix.parent, name, last=(f"{name}.idx",), error=DataError))
            self._bin = stack.enter_context(open(hidden / f"{name}.bin", "wb"))
            self._idx = stack.enter_context(open(hidden / f"{name}.idx", "wb"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
        else:
            with self._stack:
                self.complete()


def _mapped(path: str) -> NDArray[np.uint8]:
    try:
        if os.path.getsize(path) == 0:
            return np.empty(0, np.uint8)
        # A plain array over the map: taking a slice of a memmap costs several times more.
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); make it readable, or copy it again") from error
