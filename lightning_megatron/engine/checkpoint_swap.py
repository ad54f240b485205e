"""How does a finished folder take its final name, so that at every moment a complete one has it?

Where the kernel and the file system can, two folders exchange their names in one step (``renameat2``). Elsewhere the
old one is renamed first, and ``recover`` finds it should the program end before the second rename. Names and contents
reach the disk before anything older is deleted. What is to be deleted loses its name first, so that no half of it is
ever taken for a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from lightning_megatron.engine.checkpoint_safety import META, check_complete, check_replaceable
from lightning_megatron.errors import CheckpointError

PARTIAL = ".partial"
"""Ends the name of a folder that is being written; after an exchange, of the one that was replaced."""

_REPLACED = ".replaced"
_REMOVED = ".removed"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FolderLock:
    """Says to other programs that a folder is being written; ends with the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Lock ``folder``; a file system without locks is as if nobody else wrote.

        Raises:
            CheckpointError: If another program has it.
        """
        self._descriptor: int | None = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise CheckpointError(
                f"another program is writing {folder} at this moment; give every run a folder of its own"
            ) from None
        except OSError:  # no locks here, e.g. on some network file systems
            self.release()

    @property
    def is_held(self) -> bool:
        """False after ``release``, and where the file system has no locks."""
        return self._descriptor is not None

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked worker may hold the descriptor as well
            os.close(self._descriptor)
            self._descriptor = None


def start_partial(path: Path) -> tuple[Path, FolderLock]:
    """An empty folder beside ``path`` to write into, after what killed programs left in its parent is gone.

    Raises:
        CheckpointError: If another program is writing the same checkpoint, or ``path`` is a folder of other files.
    """
    check_replaceable(path)
    partial = path.with_name(path.name + PARTIAL)
    wait_for_deletions()
    if partial.is_dir():
        FolderLock(partial).release()
        _delete(partial)
    partial.mkdir(parents=True)
    lock = FolderLock(partial)
    _sweep(path.parent, partial)
    return partial, lock


def swap_in(partial: Path, path: Path, *, in_background: bool = False) -> None:
    """Give ``partial`` its final name; at every moment the old or the new checkpoint exists whole.

    If ``path`` does not exist, what an interrupted swap left beside it may be the only one, and stays until the end.

    Args:
        partial: The new one, complete.
        path: The final name.
        in_background: Whether a thread deletes the old one, which may take a second for every few gigabytes.
    """
    replaced = path.with_name(path.name + _REPLACED)
    sync(partial)
    if not path.is_symlink() and not path.exists():
        partial.rename(path)
        sync(path.parent)
    elif _exchange(partial, path):
        sync(path.parent)
        _delete(partial, in_background=in_background)
    else:
        _swap_in_two_steps(partial, path, replaced)
    if replaced.exists():
        _delete(replaced, in_background=in_background)


def _swap_in_two_steps(partial: Path, path: Path, replaced: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        if replaced.exists():
            _delete(replaced)
        path.rename(replaced)
    partial.rename(path)
    sync(path.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap the names of two things in one step; False where kernel, C library or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(a), None, str(b))


def remove(path: Path, *, in_background: bool = False) -> None:
    """Delete a checkpoint, a link to one, or a file, whichever ``path`` is, and what a crash left beside it.

    Args:
        path: What to delete; it has lost its name when this returns.
        in_background: Whether a thread deletes the files, which may take a second for every few gigabytes.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    for folder in (path, path.with_name(path.name + _REPLACED), path.with_name(path.name + PARTIAL)):
        if folder.is_dir() and not _is_being_written(folder):
            _delete(folder, in_background=in_background)


def is_own_within(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` really lies in one of ``folders``, and is a complete checkpoint, a link to one, or nothing.

    A path that a loaded state names may lead anywhere: ``checkpoints/../../documents``.
    """
    place = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    if not any(folder.resolve() in place.parents for folder in folders):
        return False
    try:
        there = recover(path.resolve())
        if there.exists():
            check_complete(there)
    except CheckpointError:
        return False
    return True


def wait_for_deletions() -> None:
    """Wait until the files of what was removed in the background are gone."""
    while _deletions:
        _deletions.pop().join()


def recover(path: Path) -> Path:
    """``path``, or what it replaced if a crash fell between the two renames of a file system without exchange."""
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.is_dir() else path


def discard(partial: Path) -> None:
    """Delete what a failed save has written; never raises, because what made it fail is the news."""
    shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_deletions: list[threading.Thread] = []


def _delete(path: Path, *, in_background: bool = False) -> None:
    """Delete a folder, which first takes a name that nobody reads, or a file."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    wait_for_deletions()
    removed = path.with_name(path.name.removesuffix(PARTIAL).removesuffix(_REPLACED) + _REMOVED)
    if removed.exists():
        shutil.rmtree(removed)
    path.rename(removed)
    sync(path.parent)
    (removed / META).unlink(missing_ok=True)
    if in_background:
        # Not a daemon: the end of the program waits for it.
        thread = threading.Thread(target=shutil.rmtree, args=(removed,), kwargs={"ignore_errors": True})
        thread.start()
        _deletions.append(thread)
    else:
        shutil.rmtree(removed)


def _sweep(folder: Path, own: Path) -> None:
    """Delete what killed programs left in ``folder``; what somebody works on, or has no locks, stays."""
    for left in folder.glob(f"*.ckpt{_REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f"*.ckpt{PARTIAL}"):
        # An empty folder may be one that has just been made, and is about to be locked.
        if left != own and any(left.iterdir()) and _can_be_locked(left):
            shutil.rmtree(left, ignore_errors=True)


def _can_be_locked(folder: Path) -> bool:
    """Whether surely nobody is writing ``folder``."""
    try:
        lock = FolderLock(folder)
    except CheckpointError:
        return False
    is_held = lock.is_held
    lock.release()
    return is_held


def _is_being_written(folder: Path) -> bool:
    """Whether surely somebody is writing ``folder``."""
    try:
        FolderLock(folder).release()
    except CheckpointError:
        return True
    return False
