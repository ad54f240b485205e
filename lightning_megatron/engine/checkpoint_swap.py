"""Where a checkpoint is written before it has its name, and which folders may be removed as checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from lightning_megatron.engine.checkpoint_safety import check_complete, check_replaceable
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import PARTIAL, FolderLock, recover, remove_leftovers, wait_for_deletions


def start_partial(path: Path) -> tuple[Path, FolderLock]:
    """An empty folder beside ``path`` to write into, after what killed programs left in its parent is gone.

    Raises:
        CheckpointError: If another program is writing the same checkpoint, or ``path`` is a folder of other files.
    """
    check_replaceable(path)
    partial = path.with_name(path.name + PARTIAL)
    wait_for_deletions()
    if partial.is_dir():
        FolderLock(partial, CheckpointError).release()
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    lock = FolderLock(partial, CheckpointError)
    remove_leftovers(path.parent, "*.ckpt", partial)
    return partial, lock


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
