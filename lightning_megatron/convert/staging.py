"""How does what is written slowly get its final name at once, and what becomes of what was never finished?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_megatron.errors import CheckpointError


@contextlib.contextmanager
def staged(save_path: Path) -> Iterator[Path]:
    """Give a path of the same name in a hidden folder beside ``save_path``, and rename it when all is written.

    What a killed run has left there is removed; what fails here leaves nothing.

    Raises:
        CheckpointError: If something cannot be written, or another process is writing it.
    """
    container = save_path.with_name(f".{save_path.name}.partial")
    with _disk_errors(save_path):
        container.mkdir(parents=True, exist_ok=True)
        lock = os.open(container, os.O_RDONLY)
    try:
        _lock(lock, save_path)
        try:
            with _disk_errors(save_path):
                _empty(container)
                yield container / save_path.name
                _to_disk(container)
                (container / save_path.name).rename(save_path)
        finally:
            shutil.rmtree(container, ignore_errors=True)
    finally:
        os.close(lock)


def _lock(folder: int, save_path: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(f"save_path={save_path} is being written by another process; wait for it") from None
    except OSError:
        pass  # a file system without locks


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def _to_disk(folder: Path) -> None:
    """Names become final only when what they name has been written."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(save_path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"save_path={save_path} cannot be written ({error}); choose a folder that can be written, with enough space"
        ) from error
