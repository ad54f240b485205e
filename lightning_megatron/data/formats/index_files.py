"""What do all formats of indexed datasets share: what does an index say, how is it read, and when is it sound?

A dataset is a pair ``PREFIX.bin`` (tokens) and ``PREFIX.idx`` (where sequences and documents begin). The formats differ
in the layout of ``.idx``: ``mmap.py`` has Megatron-Core's, ``legacy.py`` the older one.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError

MMAP_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
INTEGER_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Types of tokens by their number in ``.idx``."""
CHUNK = 1 << 18
"""Elements of an index that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class DatasetHeader(ABC):
    """What the first bytes of a valid ``.idx`` say; its size agrees with them. All arrays are read in chunks."""

    format: ClassVar[str]
    """The name by which Megatron's users know the format."""

    prefix: str
    """Path of both files without suffix."""
    dtype: np.dtype[Any]
    """Type of a token in ``.bin``."""
    num_sequences: int
    """N."""
    num_document_bounds: int
    """D: one more than there are documents."""
    has_modes: bool = False
    """Whether each sequence has a mode, as those of multimodal datasets have."""

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return self.num_document_bounds - 1

    @property
    def remark(self) -> str | None:
        """What whoever uses the dataset should know about the way it was read."""
        return None

    @property
    def idx_bytes(self) -> int:
        """Size of ``.idx``."""
        return os.path.getsize(self.prefix + ".idx")

    @property
    def bin_bytes(self) -> int:
        """Size of ``.bin``."""
        return os.path.getsize(self.prefix + ".bin")

    @abstractmethod
    def lengths(self) -> Iterator[NDArray[Any]]:
        """Tokens of each sequence: N integers."""

    @abstractmethod
    def document_bounds(self) -> Iterator[NDArray[np.int64]]:
        """First sequence of each document and, last, N: D integers."""

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Mode of each sequence: N integers, or none if the dataset has no modes."""
        return iter(())


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
    missing = [str(path) for path in (idx_path, bin_path) if not os.path.isfile(path)]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    return idx_path, bin_path


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in the error that reading it causes.

    Raises:
        DataError: If the body raises an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); make it readable, or copy it again") from error


def first_bytes(path: Path, count: int) -> bytes:
    """The first ``count`` bytes of a file, fewer if it is shorter."""
    with reading(path), open(path, "rb") as stream:
        return stream.read(count)


def read_chunks(path: Path, dtype: str, count: int, offset: int) -> Iterator[NDArray[Any]]:
    """An array of the index in chunks: a corpus of a billion documents has an index of 20 GB.

    Raises:
        DataError: If the file has become shorter since its size was checked, or cannot be read.
    """
    itemsize = np.dtype(dtype).itemsize
    with reading(path), open(path, "rb") as stream:
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
