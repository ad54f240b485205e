"""Directories that are built once, by one of the processes that need them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.storage.checksums import FileChecksums, verify_checksums, write_checksums
from lightning_megatron.storage.publish import staged

_log = logging.getLogger(__name__)

_MANIFEST = "index.json"
_QUIET_WAIT_S = 5.0
_READ_BYTES = 1 << 22
_REMEMBERED_FOLDERS = 256


def build_once(
    folder: str,
    write: Callable[[str], str],
    subject: str,
    option: str = "index_cache",
) -> str:
    """Build ``folder`` unless it exists, in one of the processes that need it, and return its fingerprint.

    Its ``checksums.json`` has the sizes and CRC-32 of its files: a damaged directory is built again. Each process reads
    the files for that once, at 4 to 5 GB/s from the page cache. The building process holds a lock, which ends with the
    process, and the other processes wait.

    Args:
        folder: Absolute path; its name identifies its content.
        write: Fills an empty directory, and returns a fingerprint that is equal for equal orders of equal documents.
        subject: What is indexed, for messages.
        option: Option that names another place for ``folder``, for messages.

    Raises:
        DataError: If the directory cannot be written.
    """
    path = Path(folder)
    if (fingerprint := _read_fingerprint(path)) is not None:
        return fingerprint
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file, mode=0o666)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=_QUIET_WAIT_S)
        except Timeout:
            _log.warning(
                "Waiting for the process that builds the index %s; if there is none, delete %s.",
                path,
                file,
            )
            held = lock.acquire()
        with held:
            fingerprint = _read_fingerprint(path)
            if fingerprint is None:
                if os.path.lexists(path):
                    _log.warning(
                        "The index %s is damaged and is not used: it is built again.", folder
                    )
                _log.info("Building the index of %s in %s.", subject, folder)
                with staged(path.parent, path.name, error=DataError) as hidden:
                    staging = hidden / path.name
                    staging.mkdir()
                    fingerprint = write(str(staging))
                    manifest = json.dumps({"order": {"fingerprint": fingerprint}}, indent=1)
                    (staging / _MANIFEST).write_text(manifest, encoding="utf-8")
                    files = sorted(staging.iterdir())
                    write_checksums(staging, {file.name: _checksums_of(file) for file in files})
            # Processes that opened the lock file before find a complete directory when it is released.
            file.unlink(missing_ok=True)
            return fingerprint
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set {option}"
        ) from error


def is_built(folder: str) -> bool:
    """Whether ``folder`` is there, complete and undamaged."""
    return _read_fingerprint(Path(folder)) is not None


def _read_fingerprint(folder: Path) -> str | None:
    """Fingerprint of an index; None if the directory is missing or damaged."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, ConfigError):
        files = []
        for entry in os.scandir(folder):
            stat = entry.stat()
            files.append(
                (
                    entry.name,
                    stat.st_size,
                    stat.st_mtime_ns,
                    stat.st_ino,
                )
            )
        _verify_once(folder, tuple(files))
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return str(manifest["order"]["fingerprint"])
    return None


@lru_cache(_REMEMBERED_FOLDERS)
def _verify_once(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> None:
    """Verify the checksums of a directory unless this process has done so with the same files.

    Args:
        folder: The directory.
        files: Name, size, modification time and inode of each of its files.

    Raises:
        CheckpointError: If a file is damaged.
    """
    for name, *_ in files:
        file = folder / name
        if not file.is_file() or file.is_symlink():
            raise DataError(f"{folder}: expected files alone, got a directory or a link; remove it")
    verify_checksums(folder)


def _checksums_of(file: Path) -> FileChecksums:
    checksums = FileChecksums()
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            checksums.update(data)
    return checksums
