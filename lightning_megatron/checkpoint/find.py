"""Find complete checkpoints in folders.

What has the right name may be a link to a checkpoint that was never finished, and the right one may have another name:
a run can be killed between any two of the steps that save, link and remove. Nothing is repaired here; the next save
puts the names in order.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.checkpoint.files import META, check_complete, failures_as_errors, is_distributed, load_plain
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import PARTIAL, as_path, is_remote, recover

ENDING = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint."""

    path: Path
    step: int
    """Optimizer steps that it has behind it."""
    time: float
    """When it was saved, in seconds of the epoch."""
    has_optimizer: bool = True
    """Whether training can go on from it; False for ``save_weights_only``."""


def check_writable(folders: Iterable[Path]) -> None:
    """Raise if checkpoints surely cannot be saved in one of ``folders``, which need not exist yet.

    Raises:
        CheckpointError: If it, or what is there of the path to it, is no folder or must not be written; in a store, if
            this rank cannot write and delete a file there.
    """
    for folder in folders:
        if is_remote(folder):
            with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
                probe = folder / f".can_be_written_{uuid.uuid4().hex}"
                probe.write_bytes(b"")
                probe.unlink()
            continue
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            obstacle = "read-only" if there.is_dir() else "no folder"
            raise CheckpointError(
                f"checkpoints cannot be saved in {folder}: {there} is {obstacle}; give another dirpath"
            )


def is_complete(path: Path) -> bool:
    """Whether ``path``, or what an interrupted save left of it, is a complete checkpoint."""
    try:
        check_complete(recover(path))
    except CheckpointError:
        return False
    return True


def found_at(path: Path) -> Found | None:
    """The checkpoint ``path``; None unless it is complete and can be read."""
    if not is_complete(path):
        return None
    try:
        return _described(path)
    except (CheckpointError, FileNotFoundError) as error:
        if is_complete(path):  # else another process has removed it meanwhile
            rank_zero_warn(f"{error}. It is passed over, though its folder has all files")
        return None


def found_in(folder: Path) -> Iterator[Found]:
    """The complete checkpoints in ``folder``, links among them."""
    for name in _names(folder):
        if (found := found_at(folder / name)) is not None:
            yield found


def find_newest(path: Path, step: int | None = None, *, to_resume: bool = False) -> Found:
    """The checkpoint ``path``, or the one with most steps in the folder ``path``.

    Args:
        path: A checkpoint or a folder of some.
        step: The one of the folder to take instead, or the step that the checkpoint must be of.
        to_resume: Take one with only weights if the folder has no other.

    Raises:
        CheckpointError: If there is none.
    """
    path = as_path(os.path.expanduser(str(path))).absolute()  # no shell has read what stands in a YAML file
    own = recover(path)
    is_one = (own / META).is_file() or not own.is_dir()
    if is_one:
        check_complete(own)
    found = [_described(path)] if is_one else preferred(found_in(path), to_resume)
    if of_step := [each for each in found if step in (None, each.step)]:
        return newest(of_step)
    if found:
        steps = ", ".join(str(step) for step in sorted({each.step for each in found}))
        raise CheckpointError(f"{path} has no complete checkpoint of step={step}; those it has: {steps}")
    if (program := _other_program(path)) is not None:
        raise CheckpointError(f"{path} is {program}; convert it with `lightning-megatron convert`")
    if broken := broken_names(path):
        raise CheckpointError(f"none of the checkpoints in {path} is complete: {', '.join(broken)}; give another path")
    check_complete(path)
    return _described(path)


def newest(found: Iterable[Found]) -> Found:
    """The one with most steps, and of those the last one saved."""
    return max(found, key=lambda each: (each.step, each.time))


def preferred(found: Iterable[Found], to_resume: bool) -> list[Found]:
    """``found`` without those that have only weights, unless there are no others or they will do."""
    every = list(found)
    whole = [each for each in every if each.has_optimizer]
    return whole if to_resume and whole else every


def broken_names(folder: Path) -> list[str]:
    """Checkpoints that are damaged or foreign; not links to one that was being written when its run was killed."""
    named = [each for each in (folder / name for name in _names(folder)) if each.is_symlink() or each.exists()]
    was_begun = [path.is_symlink() and Path(f"{path.resolve()}{PARTIAL}").exists() for path in named]
    return [path.name for path, begun in zip(named, was_begun, strict=True) if not begun and not is_complete(path)]


def is_own_within(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` really lies in one of ``folders``, and is a complete checkpoint, a link to one, or nothing.

    A path that a loaded state names may lead anywhere: ``checkpoints/../../documents``.
    """
    place = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    if not any(folder.resolve() in place.parents for folder in folders):
        return False
    return not recover(path.resolve()).exists() or is_complete(path.resolve())


def _names(folder: Path) -> list[str]:
    """The checkpoints in ``folder``, also those of which only what an interrupted save left beside them is there."""
    present = [path.name.partition(ENDING) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted({stem + ending for stem, ending, _ in present if ending})


def _described(path: Path) -> Found:
    meta = recover(path) / META
    state = load_plain(meta)
    known = state if isinstance(state, dict) else {}
    return Found(
        path=path,
        step=int(known.get("lightning", {}).get("global_step", 0)),
        time=float(known.get("time", meta.stat().st_mtime)),  # a copy has another mtime
        has_optimizer=bool(known.get("has_optimizer", True)),
    )


def _other_program(path: Path) -> str | None:
    if (path / "config.json").is_file():
        return "a model of Hugging Face"
    if is_distributed(path) and path.suffix != ENDING:  # one of ours that lost its meta.pt is damaged
        return "a checkpoint that another program wrote with Megatron-Core"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")):
        return "a checkpoint of Megatron-LM"
    return None
