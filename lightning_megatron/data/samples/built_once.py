"""How is a folder built once, by one of many processes that want it at the same time, and never seen half-built?

A folder appears by renaming one that is complete. Its ``index.json`` has the sizes of its files, so that damage is
found out. Who builds holds a lock of the file system, which ends with the process, however that dies; where the file
system has no locks, several may build the same folder, and the first wins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)

_MANIFEST = "index.json"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_QUIET_WAIT_S = 5.0
_LONGEST_WAIT_S = 7200.0
_POLL_S = 0.1
_ABANDONED_S = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """An order of samples that exists on disk."""

    num_samples: int
    """Samples in it: at least as many as were requested."""
    fingerprint: str
    """Equal for equal orders of equal documents; a resumed run finds out by it whether it goes on in the same order."""


def build_once(folder: str, write: Callable[[str], SampleOrder], subject: str) -> SampleOrder:
    """What ``folder`` holds, after building it if it does not exist or is damaged.

    Args:
        folder: Path; its name is its content's.
        write: Fills an empty folder, and says what is in it.
        subject: What it is, for messages, e.g. the dataset.

    Raises:
        DataError: If it cannot be written, or another process has been building it for too long.
    """
    order = _read(folder)
    if order is not None:
        return order
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with _lock(folder) as locked:
            order = _read(folder)
            return order if order is not None else _build(folder, write, locked)
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache to a"
            " folder that can be written"
        ) from error


def _read(folder: str) -> SampleOrder | None:
    """What a folder says of itself; None if there is none, or not as it was written."""
    try:
        with open(os.path.join(folder, _MANIFEST), encoding="utf-8") as stream:
            manifest = json.load(stream)
        sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in manifest["sizes"]}
        if sizes == manifest["sizes"]:
            return SampleOrder(**manifest["order"])
    except FileNotFoundError:
        if not os.path.isdir(folder):
            return None
    except (ValueError, KeyError, TypeError):
        pass
    _log.warning("The index %s is damaged and is built again.", folder)
    return None


def _build(folder: str, write: Callable[[str], SampleOrder], locked: bool) -> SampleOrder:
    parent, name = os.path.split(folder)
    _remove_leftovers(parent, name, locked)
    staging = os.path.join(parent, f".building-{name}-{uuid.uuid4().hex[:12]}")
    os.mkdir(staging)
    try:
        order = write(staging)
        sizes = {file: os.path.getsize(os.path.join(staging, file)) for file in os.listdir(staging)}
        with open(os.path.join(staging, _MANIFEST), "w", encoding="utf-8") as stream:
            json.dump({"order": asdict(order), "sizes": sizes}, stream, indent=1)
        for path in (*(os.path.join(staging, file) for file in os.listdir(staging)), staging):
            _sync(path)
        if os.path.isdir(folder):  # damaged
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, f"{staging}-damaged")
        try:
            os.rename(staging, folder)
        except OSError:
            # Without locks another job may have built the same in the meantime; its files are as good.
            if _read(folder) is None:
                raise
        _sync(parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(f"{staging}-damaged", ignore_errors=True)
    return order


def _remove_leftovers(parent: str, name: str, locked: bool) -> None:
    """What killed jobs left: under the lock nobody else builds this folder."""
    for entry in os.listdir(parent):
        path = os.path.join(parent, entry)
        if entry.startswith(f".building-{name}-") and (locked or _age_s(path) > _ABANDONED_S):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: str) -> Iterator[bool]:
    """Hold the lock of ``folder``; False if the file system has none."""
    parent, name = os.path.split(folder)
    path = os.path.join(parent, f".{name}.lock")
    begin = time.monotonic()
    logged = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                _log.warning("%s has no file locks; jobs that start at once may all build the same index.", parent)
                yield False
                return
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        else:
            if _is_file(descriptor, path):
                break
            # Whoever held it has finished and removed the file.
            os.close(descriptor)
            continue
        waited = time.monotonic() - begin
        if waited > _LONGEST_WAIT_S:
            raise DataError(
                f"the index {folder} has been in the making by {holder} for more than {_LONGEST_WAIT_S:.0f} s; end that"
                " process if it hangs, or set index_cache to another folder"
            )
        if waited > _QUIET_WAIT_S and not logged:
            logged = True
            _log.warning("Waiting for %s, which builds the index %s.", holder, folder)
        time.sleep(_POLL_S)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield True
    finally:
        # Removed while it is held: who waits for it finds out that it is no longer the file of this name.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


def _is_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _age_s(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
