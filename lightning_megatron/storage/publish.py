"""Atomic publication of files and directories, on disks and object stores.

Output that takes long to write is written beside its final name and published when it is complete, so that readers of
the final name see either the old or the new content, always complete::

    with staged(folder, "model", error=CheckpointError) as partial:
        (partial / "model").mkdir()  # or any number of files and directories, under their final names
        ...
    # folder/model is now the new one; after an exception it is unchanged, and nothing is left behind

``publish`` is the last step alone, for writers that outlive a ``with`` block. Where kernel and file system support it,
two directories exchange their names atomically (``renameat2``). Elsewhere (e.g. NFS) the old one is renamed first, and
``recover`` finds it if the program dies before the second rename. Contents and names are synced to disk before anything
older is deleted, and a directory is renamed before it is deleted, so that a half-deleted one is never read.

In an object store a replacement for an existing directory is written beside it and then copied by the store;
``recover`` finds it if the program dies meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lightning_megatron.errors import ConfigError
from lightning_megatron.storage.locks import FolderLock
from lightning_megatron.storage.paths import file_sizes, is_remote, sync
from lightning_megatron.storage.stores import COMPLETE_MARKER, delete_from_store

PARTIAL = ".partial"
"""Suffix of a directory being written; after an exchange, of the one that was replaced."""

_REPLACED = ".replaced"
_REMOVED = ".removed"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, with which batch systems end jobs, into ``SystemExit``, so that partial output is removed."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def staged(
    folder: Path,
    name: str,
    *,
    last: Collection[str] = (),
    error: type[ConfigError] = ConfigError,
) -> Iterator[Path]:
    """Yield a locked, empty, hidden staging directory in ``folder``; publish its content when the block ends.

    Existing files and directories of the same names are replaced. Leftovers of a killed run are removed first, and
    after an exception nothing is left.

    Args:
        folder: Final directory of the content; created if missing.
        name: Name of the output, from which the staging directory is named: only one process at a time can write it.
        last: Files whose presence implies that the others are complete, e.g. an index: deleted first, published last.
        error: Type of the exception to raise.

    Raises:
        ConfigError: As type ``error``, if another process writes the same output, or it cannot be written.
    """
    partial = folder / f".{name}{PARTIAL}"
    try:
        lock = lock_partial(partial, error)
        try:
            yield partial
            wait_for_deletions()  # replaced output in the staging directory must be neither synced nor published
            for file in partial.rglob("*"):
                sync(file)
            for file_name in last:
                (folder / file_name).unlink(missing_ok=True)
            for file in sorted(partial.iterdir(), key=lambda file: file.name in last):
                publish(file, folder / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
            wait_for_deletions()
    except OSError as failure:
        raise error(
            f"{folder / name} cannot be written ({failure}); choose a writable directory with enough space"
        ) from failure


def lock_partial(partial: Path, error: type[ConfigError]) -> FolderLock:
    """Create a staging directory, lock it, and delete what a killed run left in it.

    Somebody else may have made a link or a directory of this name: nothing is followed, and nothing of theirs deleted.

    Raises:
        ConfigError: As type ``error``, if another process is writing it, it is a link, or it belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        partial.mkdir(parents=True)
    lock = FolderLock(partial, error)
    try:
        _empty(partial, error)
    except BaseException:
        lock.release()
        raise
    return lock


def _empty(partial: Path, error: type[ConfigError]) -> None:
    """Delete the content of a staging directory of this user, through one descriptor: the name may change meanwhile.

    Raises:
        ConfigError: As type ``error``, if it has content and belongs to another user.
    """
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        names = os.listdir(descriptor)
        owner = os.fstat(descriptor).st_uid
        if names and not _is_this_user(owner, partial.parent):
            raise error(
                f"{partial}: expected a directory of this user, got one of user {owner} with files in it; remove it if "
                "nobody is writing there"
            )
        for name in names:
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(name, dir_fd=descriptor)
            else:
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _is_this_user(owner: int, folder: Path) -> bool:
    """Whether ``owner`` owns what this process creates in ``folder``: a network file system may map root to nobody."""
    if owner == os.geteuid():
        return True
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner_") as probe:
        return os.fstat(probe.fileno()).st_uid == owner


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``; at every moment either the old or the new one exists and is complete.

    If ``path`` does not exist, what an interrupted ``publish`` left beside it may be the only copy, and is deleted
    last. A replaced directory is deleted in the background.

    Args:
        partial: A complete directory or file on the same file system, with its files synced.
        path: The final name.
    """
    if is_remote(path):
        _publish_remote(partial, path)
        return
    replaced = path.with_name(path.name + _REPLACED)
    sync(partial)
    if not os.path.lexists(path) or (partial.is_file() and not path.is_dir()):
        partial.replace(path)
    elif _exchange(partial, path):
        sync(path.parent)
        _delete(partial)
    else:
        _delete_now(replaced)
        path.rename(replaced)
        partial.rename(path)
    sync(path.parent)
    if os.path.lexists(replaced):
        _delete(replaced)


def _publish_remote(partial: Path, path: Path) -> None:
    if partial != path:
        delete_from_store(path)
        source: Any = partial
        target: Any = path
        for name in sorted(file_sizes(partial), key=lambda name: name == COMPLETE_MARKER):
            target.fs.copy((source / name).path, (target / name).path)
    delete_from_store(path.with_name(path.name + PARTIAL))


def recover(path: Path) -> Path:
    """``path``, or the complete replaced or staged directory beside it if a crash interrupted a ``publish``."""
    if is_remote(path):
        partial = path.with_name(path.name + PARTIAL)
        is_complete = (path / COMPLETE_MARKER).is_file()
        if not is_complete and (partial / COMPLETE_MARKER).is_file():
            return partial
        return path
    replaced = path.with_name(path.name + _REPLACED)
    if not path.exists() and replaced.is_dir():
        return replaced
    return path


def remove(path: Path) -> None:
    """Delete a directory, link or file, and what a crash left beside it.

    The name is gone when this returns; the files of a directory are deleted in the background.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if is_remote(path):
        delete_from_store(path.with_name(path.name + PARTIAL))
        delete_from_store(path)
        return
    replaced = path.with_name(path.name + _REPLACED)
    for folder in (path, replaced):
        if folder.is_dir():  # of a link, the link is deleted
            _delete(folder)
    _remove_if_abandoned(path.with_name(path.name + PARTIAL))


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete leftovers of killed processes in ``folder`` whose names match ``pattern``, unless they are locked."""
    for leftover in folder.glob(f"{pattern}{_REMOVED}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob(f"{pattern}{PARTIAL}"):
        _remove_if_abandoned(leftover)


def _remove_if_abandoned(partial: Path) -> None:
    """Delete a staging directory unless it is locked, or the file system has no locks to tell."""
    if partial.is_symlink() or not partial.is_dir():
        return
    if not any(partial.iterdir()):  # it may have just been created, and is about to be locked
        return
    with contextlib.suppress(ConfigError):
        lock = FolderLock(partial)
        if lock.descriptor is not None:
            owner = os.fstat(lock.descriptor).st_uid
            if _is_this_user(owner, partial.parent):
                shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def wait_for_deletions() -> None:
    """Wait for all deletions in the background."""
    while _deletions:
        _deletions.pop().result()


_deleter = ThreadPoolExecutor(1)
_deletions: list[Future[None]] = []


def _delete(path: Path) -> None:
    """Delete a file, or rename a directory and delete it in a thread: that takes a second for a few gigabytes."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    wait_for_deletions()
    name = path.name.removesuffix(PARTIAL).removesuffix(_REPLACED)
    removed = path.with_name(name + _REMOVED)
    _delete_now(removed)
    path.rename(removed)
    sync(path.parent)
    deletion = _deleter.submit(shutil.rmtree, removed, ignore_errors=True)
    _deletions.append(deletion)  # exit waits for it


def _delete_now(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False if kernel, C library or file system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b))
    if renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(a), None, str(b))
