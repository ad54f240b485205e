"""Are the bytes of a checkpoint those that were written? A CRC-32 for every 64 MiB of every file says so.

``checksums.json`` holds them. Nothing here communicates or needs torch: one process can write them for a whole folder
(``write_checksums``) or check its share of one (``verify_checksums``). CRC-32 finds every flipped bit and every burst
of up to 32 bits; it is no protection against somebody who means harm.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.errors import CheckpointError

CHECKSUMS = "checksums.json"
"""Absent from checkpoints of earlier versions, which are loaded without this check."""

SEGMENT = 64 * 2**20
"""Bytes that one checksum covers; the last one of a file covers what is left."""

_PIECE = 4 * 2**20
_THREADS = 4
_ALGORITHM = "crc32"


@dataclass(kw_only=True)
class FileChecksums:
    """The checksums of one file, which grow as it is written from its beginning to its end."""

    size: int = 0
    """Bytes."""
    segments: list[int] = field(default_factory=list)
    """CRC-32 of each ``SEGMENT`` bytes."""

    def update(self, data: memoryview) -> None:
        """Append bytes; other threads run meanwhile, since zlib lets go of the interpreter."""
        while len(data) > 0:
            room = SEGMENT - self.size % SEGMENT
            if room == SEGMENT:
                self.segments.append(0)
            self.segments[-1] = zlib.crc32(data[:room], self.segments[-1])
            self.size += min(room, len(data))
            data = data[room:]


def checksums_of(data: bytes) -> FileChecksums:
    """The checksums of a file with this content."""
    checksums = FileChecksums()
    checksums.update(memoryview(data))
    return checksums


def checksums_of_file(file: Path) -> FileChecksums:
    """The checksums of a file that is there."""
    size = file.stat().st_size
    starts = range(0, size, SEGMENT)
    with ThreadPoolExecutor(_THREADS) as pool:
        return FileChecksums(size=size, segments=list(pool.map(lambda start: _crc32(file, start, size), starts)))


def write_checksums(folder: Path, unwritten: Mapping[str, bytes] | None = None) -> None:
    """Write ``checksums.json`` for all files in a folder and below, which must not change any more.

    Args:
        folder: A checkpoint that is complete but for this file and ``unwritten``.
        unwritten: Contents of files that will be written after it, by name, e.g. of ``meta.pt``.
    """
    found = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*") if each.is_file()}
    files = {name: checksums_of_file(file) for name, file in found.items() if name != CHECKSUMS}
    write_known_checksums(folder, files | {name: checksums_of(data) for name, data in (unwritten or {}).items()})


def write_known_checksums(folder: Path, files: Mapping[str, FileChecksums]) -> None:
    """Write ``checksums.json`` from what is known, and wait until it is on the disk."""
    described = {name: asdict(files[name]) for name in sorted(files)}
    content = {
        "algorithm": _ALGORITHM,
        "segment_bytes": SEGMENT,
        "files": described,
        "checksum_of_files": _checksum_of_table(described),
    }
    with (folder / CHECKSUMS).open("w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def verify_checksums(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Read a share of a checkpoint's bytes and compare; nothing happens if it has no checksums.

    Args:
        folder: The checkpoint.
        share: ``(rank, world)``: this is share ``rank`` of ``world`` about equal ones.

    Raises:
        CheckpointError: If a file is missing, has another size or other bytes than were written; the first such file
            and its bytes are named.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    files = _read_checksums(folder)
    for name, checksums in files.items():
        _check_size(folder, name, checksums.size)
    work = [(name, index) for name, checksums in files.items() for index in range(len(checksums.segments))]
    rank, world = share
    mine = work[len(work) * rank // world : len(work) * (rank + 1) // world]

    def is_damaged(place: tuple[str, int]) -> bool:
        name, index = place
        return _crc32(folder / name, index * SEGMENT, files[name].size) != files[name].segments[index]

    with ThreadPoolExecutor(_THREADS) as pool:
        _raise_for_damage(
            folder, files, [place for place, bad in zip(mine, pool.map(is_damaged, mine), strict=True) if bad]
        )


def _raise_for_damage(folder: Path, files: Mapping[str, FileChecksums], damaged: Iterable[tuple[str, int]]) -> None:
    for name, index in damaged:
        start = index * SEGMENT
        end = min(start + SEGMENT, files[name].size)
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {name} differs from its checksum in bytes {start}-{end}; use an earlier "
            "one"
        )


def _read_checksums(folder: Path) -> dict[str, FileChecksums]:
    try:
        content: dict[str, Any] = json.loads((folder / CHECKSUMS).read_bytes())
        described = content["files"]
        known = content["algorithm"] == _ALGORITHM and content["segment_bytes"] == SEGMENT
        if not known or content["checksum_of_files"] != _checksum_of_table(described):
            raise ValueError("its content is not what was written")
        return {name: _file_checksums(each) for name, each in described.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {CHECKSUMS} cannot be read ({error}); use an earlier one"
        ) from None


def _file_checksums(described: Mapping[str, Any]) -> FileChecksums:
    checksums = FileChecksums(**described)
    if type(checksums.size) is not int or len(checksums.segments) != -(-checksums.size // SEGMENT):
        raise ValueError("a file has not as many checksums as its size needs")
    return checksums


def _checksum_of_table(described: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(described, sort_keys=True).encode())


def _check_size(folder: Path, name: str, size: int) -> None:
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {folder} lacks its file {name}: it is damaged; use an earlier one")
    found = file.stat().st_size
    if found != size:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {name} has {found} bytes and was written with {size}; use an earlier one"
        )


def _crc32(file: Path, start: int, size: int) -> int:
    """Of the segment that begins at ``start``, read in pieces so that little memory is needed."""
    crc = 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        left = min(SEGMENT, size - start)
        while left > 0:
            data = stream.read(min(_PIECE, left))
            if not data:
                break  # shorter than it was a moment ago: the checksum will differ
            crc = zlib.crc32(data, crc)
            left -= len(data)
    return crc
