"""``checksums.json``: a CRC-32 for every 64 MiB of every other file of a directory, by which damage is located.

CRC-32 detects every flipped bit and every burst of up to 32 bits; it does not protect against deliberate tampering.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.paths import file_sizes, synced_file

CHECKSUMS = "checksums.json"

SEGMENT = 64 * 2**20
"""Bytes covered by one checksum; the last one of a file covers the remainder."""

_READ_SIZE = 4 * 2**20
_THREADS = 4
_ALGORITHM = "crc32"


@dataclass(kw_only=True)
class FileChecksums:
    """Checksums of one file, updated as it is written sequentially."""

    size: int = 0
    """Bytes so far."""
    segments: list[int] = field(default_factory=list)
    """CRC-32 of each segment of ``SEGMENT`` bytes."""

    def update(self, data: bytes | memoryview) -> FileChecksums:
        """Append bytes; zlib releases the GIL meanwhile."""
        data = memoryview(data)
        while len(data) > 0:
            room = SEGMENT - self.size % SEGMENT
            if room == SEGMENT:
                self.segments.append(0)
            piece = data[:room]
            self.segments[-1] = zlib.crc32(piece, self.segments[-1])
            self.size += len(piece)
            data = data[room:]
        return self


def write_checksums(folder: Path, files: Mapping[str, FileChecksums]) -> None:
    """Write ``checksums.json`` and sync it."""
    table = {name: asdict(files[name]) for name in sorted(files)}
    content = {
        "algorithm": _ALGORITHM,
        "segment_bytes": SEGMENT,
        "files": table,
        "checksum_of_files": _checksum_of_table(table),
    }
    with synced_file(folder / CHECKSUMS) as stream:
        stream.write(json.dumps(content).encode())


def verify_checksums(
    folder: Path,
    share: tuple[int, int] = (0, 1),
    only: Collection[str] | None = None,
) -> None:
    """Verify the checksums of a checkpoint, or of one share of its segments.

    Args:
        folder: The checkpoint.
        share: ``(rank, world)``: verify share ``rank`` of ``world`` about equal ones.
        only: Names of the files to verify; None for all.

    Raises:
        CheckpointError: If a file is missing, or its size or a checksum differs; names the first such file and bytes.
    """
    files = _read_checksums(folder)
    if only is not None:
        files = {name: checksums for name, checksums in files.items() if name in only}
    sizes = file_sizes(folder)
    for name, checksums in files.items():
        if name not in sizes:
            require_file(folder / name)
        size = sizes.get(name)
        if size != checksums.size:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {size} of {checksums.size} bytes; use an earlier one"
            )
    work = [
        (name, index)
        for name, checksums in files.items()
        for index in range(len(checksums.segments))
    ]
    rank, world = share
    begin = len(work) * rank // world
    end = len(work) * (rank + 1) // world

    def verify(name: str, index: int) -> None:
        start = index * SEGMENT
        stop = min(start + SEGMENT, files[name].size)
        if _crc32(folder / name, start, stop) != files[name].segments[index]:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} differs from its checksum in bytes {start}-{stop}; use an "
                "earlier one"
            )

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(verify, *zip(*work[begin:end], strict=True)))


def _read_checksums(folder: Path) -> dict[str, FileChecksums]:
    try:
        content: dict[str, Any] = json.loads((folder / CHECKSUMS).read_bytes())
        table = content["files"]
        is_same = content["algorithm"] == _ALGORITHM and content["segment_bytes"] == SEGMENT
        is_same &= content["checksum_of_files"] == _checksum_of_table(table)
        files = {name: FileChecksums(**each) for name, each in table.items()}
        for each in files.values():
            num_segments = -(-each.size // SEGMENT)
            is_same &= type(each.size) is int and len(each.segments) == num_segments
        if not is_same:
            raise ValueError("its content has changed since it was written")
        return files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {CHECKSUMS} cannot be read ({error}); use an earlier one"
        ) from None


def _checksum_of_table(table: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())


def _crc32(file: Path, start: int, stop: int) -> int:
    """CRC-32 of the bytes from ``start`` to ``stop``, read in small pieces to save memory."""
    crc = 0
    with file.open("rb") as stream:
        stream.seek(start)
        for begin in range(start, stop, _READ_SIZE):  # of a truncated file, the checksum differs
            piece = stream.read(min(_READ_SIZE, stop - begin))
            crc = zlib.crc32(piece, crc)
    return crc


def require_file(file: Path) -> None:
    """Check that a file of a checkpoint exists.

    Raises:
        CheckpointError: If it does not.
    """
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {file.parent} lacks its file {file.name}: it was never finished, is damaged, or another "
            "program wrote it; use an earlier one"
        )
