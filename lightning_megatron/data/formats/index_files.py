"""What do all formats of indexed datasets share: how is a pair ``PREFIX.bin``, ``PREFIX.idx`` published and checked?

The formats differ in the layout of ``.idx``: ``mmap.py`` has Megatron-Core's, ``legacy.py`` the older one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError

MMAP_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
INTEGER_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Types of tokens by their number in ``.idx``."""
CHUNK = 1 << 20
"""Elements of an index that are in memory at a time."""


def existing_pair(prefix: str, option: str) -> tuple[Path, Path]:
    """Paths of ``.idx`` and ``.bin``, which exist.

    Args:
        prefix: What the user gave.
        option: The setting that it was given for.

    Raises:
        DataError: If a file is missing, or ``prefix`` is a file.
    """
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise DataError(f"{option}={prefix} is a file, it must be the prefix; write {prefix.removesuffix(suffix)}")
    idx_path, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    missing = [str(path) for path in (idx_path, bin_path) if not path.is_file()]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    return idx_path, bin_path


def read_chunks(path: Path, dtype: str, count: int, offset: int) -> Iterator[NDArray[Any]]:
    """An array of the index in chunks: a corpus of a billion documents has an index of 20 GB.

    Raises:
        DataError: If the file has become shorter since its size was checked.
    """
    itemsize = np.dtype(dtype).itemsize
    with open(path, "rb") as stream:
        stream.seek(offset)
        for begin in range(0, count, CHUNK):
            wanted = min(CHUNK, count - begin) * itemsize
            data = stream.read(wanted)
            if len(data) != wanted:
                raise DataError(f"{path} has become shorter while it was read; let no other job write it, run again")
            yield np.frombuffer(data, dtype=dtype)


def check_document_bounds(bounds: Iterator[NDArray[np.int64]], num_sequences: int, idx_path: Path, fix: str) -> None:
    """Documents begin at the first sequence, are in order and end with the last one.

    Raises:
        DataError: If they do not.
    """
    last = 0
    for number, chunk in enumerate(bounds):
        begins_right = number > 0 or chunk[0] == 0
        # Compared, not subtracted: damaged bounds may be any 64-bit numbers.
        if not begins_right or chunk[0] < last or (chunk[1:] < chunk[:-1]).any():
            raise DataError(f"{idx_path} has document bounds that do not ascend from 0: damaged; {fix}")
        last = int(chunk[-1])
    if last != num_sequences:
        raise DataError(f"{idx_path} ends its last document at sequence {last} of {num_sequences}: damaged; {fix}")


class StagedPair(ABC):
    """Writes one dataset; it appears under its name only when it is complete.

    Use as a context manager: leaving it normally publishes the files, leaving it by an exception removes them. A killed
    process leaves only files whose names begin with a dot. ``.idx`` appears last, so it vouches for ``.bin``.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = Path(prefix)
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin_staging = self._staging_path(".bin")
        self._idx_staging = self._staging_path(".idx")
        self._stream = open(self._bin_staging, "wb")  # noqa: SIM115 (closed by __exit__)

    def write(self, tokens: bytes) -> None:
        """Append to ``.bin``."""
        self._stream.write(tokens)

    @abstractmethod
    def _index_parts(self) -> Iterator[bytes]:
        """The bytes of ``.idx``; asked for after the last token."""

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
