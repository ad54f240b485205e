r"""How are tokens stored on disk: Megatron's indexed dataset, a pair ``PREFIX.bin`` and ``PREFIX.idx`` ("mmap")?

Layout, little endian. ``.bin``: all tokens one after the other. ``.idx``: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8
type of a token; u64 N sequences; u64 D; int32[N] lengths in tokens; int64[N] positions in bytes; int64[D] the first
sequence of each document and, last, N; optionally int8[N] modes. For GPT a document is one sequence, so D = N + 1.

The writer produces these bytes itself: the engine's builder would cost the import of torch, and leaves half-written
files under the final names when it is interrupted. The reader checks what the engine maps into memory unseen.
Source: megatron-core 0.16.1, datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this are stored as uint16, larger ones as int32: Megatron's rule (``DType.optimal_dtype``)."""

_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
_FLOAT_CODES = (6, 7)
_CHUNK = 1 << 20


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
    idx_path, bin_path = _existing_files(prefix)
    size = idx_path.stat().st_size
    with open(idx_path, "rb") as stream:
        head = stream.read(HEADER_BYTES)
    _require_magic(idx_path, head)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{idx_path} has {size} bytes, its header alone needs {HEADER_BYTES}: truncated; {_AGAIN}")
    version, code, num_sequences, num_bounds = struct.unpack("<QBQQ", head[9:])
    if version != 1:
        raise DataError(f"{idx_path} says version {version}, the only version is 1: damaged or foreign; {_AGAIN}")
    if code not in _DTYPES:
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
    return IndexHeader(prefix=prefix, dtype=_DTYPES[code], num_sequences=num_sequences, num_document_bounds=num_bounds)


def check_dataset(prefix: str) -> IndexHeader:
    """The header of the dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Raises:
        DataError: Also if a length is negative, a sequence lies outside ``.bin``, the files do not belong together, or
            the documents are not in order.
    """
    header = read_header(prefix)
    idx_path, bin_path = _existing_files(prefix)
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
    _check_document_bounds(header, idx_path)
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


class IndexedDatasetWriter:
    """Writes one dataset; it appears under its name only when it is complete.

    Use as a context manager: leaving it normally publishes the files, leaving it by an exception removes them. A killed
    process leaves only files whose names begin with a dot. ``.idx`` appears last, so it vouches for ``.bin``.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any]) -> None:
        self._prefix = Path(prefix)
        self._dtype = dtype
        self._lengths = array("i")
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin_staging = self._staging_path(".bin")
        self._idx_staging = self._staging_path(".idx")
        self._stream = open(self._bin_staging, "wb")  # noqa: SIM115 (closed by __exit__)

    def add_documents(self, tokens: bytes, lengths: Sequence[int]) -> None:
        """Append documents of one sequence each.

        Args:
            tokens: The tokens of all of them, in the dataset's type.
            lengths: Tokens of each.
        """
        self._stream.write(tokens)
        self._lengths.extend(lengths)

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._lengths)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self._stream.close()
            self._bin_staging.unlink(missing_ok=True)
            self._idx_staging.unlink(missing_ok=True)

    def _staging_path(self, suffix: str) -> Path:
        return self._prefix.with_name(f".{self._prefix.name}{suffix}.{os.getpid()}.partial")

    def _publish(self) -> None:
        _sync_and_close(self._stream)
        with open(self._idx_staging, "wb") as stream:
            for part in self._index_parts():
                stream.write(part)
            _sync_and_close(stream)
        idx_path, bin_path = Path(f"{self._prefix}.idx"), Path(f"{self._prefix}.bin")
        # An old index must not meet the new tokens, not even for a moment.
        idx_path.unlink(missing_ok=True)
        os.replace(self._bin_staging, bin_path)
        os.replace(self._idx_staging, idx_path)
        _sync_folder(self._prefix.parent)

    def _index_parts(self) -> Iterator[bytes]:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        positions = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], out=positions[1:])
        code = next(code for code, dtype in _DTYPES.items() if dtype == self._dtype)
        yield MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        yield lengths.astype("<i4").tobytes()
        yield (positions * self._dtype.itemsize).tobytes()
        yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


_AGAIN = "run preprocess again"


def _existing_files(prefix: str) -> tuple[Path, Path]:
    idx_path, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise DataError(f"data_path={prefix} is a file, it must be the prefix; write {prefix.removesuffix(suffix)}")
    missing = [str(path) for path in (idx_path, bin_path) if not path.is_file()]
    if missing:
        raise DataError(
            f"data_path={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    return idx_path, bin_path


def _require_magic(idx_path: Path, head: bytes) -> None:
    if head[:9] == MAGIC:
        return
    if head[:8] == OLD_MAGIC:
        raise DataError(
            f"{idx_path} is in Megatron's old cached/lazy format (TNTIDX), only mmap (MMIDIDX) is read; {_AGAIN}"
        )
    if MAGIC.startswith(head):
        raise DataError(f"{idx_path} ends within its first {len(MAGIC)} bytes: truncated; {_AGAIN}")
    raise DataError(f"{idx_path} begins with {head[:9]!r}, an index begins with {MAGIC!r}: foreign file; {_AGAIN}")


def _read_array(header: IndexHeader, dtype: str, count: int, offset: int) -> Iterator[NDArray[Any]]:
    """An array of the index in chunks: a corpus of a billion documents has an index of 20 GB."""
    itemsize = np.dtype(dtype).itemsize
    with open(header.prefix + ".idx", "rb") as stream:
        stream.seek(offset)
        for begin in range(0, count, _CHUNK):
            wanted = min(_CHUNK, count - begin)
            yield np.frombuffer(stream.read(wanted * itemsize), dtype=dtype)


def _lengths(header: IndexHeader) -> Iterator[NDArray[np.int32]]:
    return _read_array(header, "<i4", header.num_sequences, HEADER_BYTES)


def _positions(header: IndexHeader) -> Iterator[NDArray[np.int64]]:
    return _read_array(header, "<i8", header.num_sequences, HEADER_BYTES + 4 * header.num_sequences)


def _check_document_bounds(header: IndexHeader, idx_path: Path) -> None:
    last = 0
    bounds = _read_array(header, "<i8", header.num_document_bounds, HEADER_BYTES + 12 * header.num_sequences)
    for number, chunk in enumerate(bounds):
        begins_right = number > 0 or chunk[0] == 0
        if not begins_right or chunk[0] < last or (np.diff(chunk) < 0).any():
            raise DataError(f"{idx_path} has document bounds that do not ascend from 0: damaged; {_AGAIN}")
        last = int(chunk[-1])
    if last != header.num_sequences:
        raise DataError(
            f"{idx_path} ends its last document at sequence {last} of {header.num_sequences}: damaged; {_AGAIN}"
        )


def _sync_and_close(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
