"""Finding complete checkpoints, and their order within a run.

A name may be a link to a checkpoint that was never finished, and a complete checkpoint may have another name: a run can
be killed between any two of the steps that save, link and remove. Nothing is repaired here; the next save restores the
names.

Nothing here communicates or imports Megatron.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lightning_megatron.checkpoint.meta import BACKENDS, META, check_complete, is_distributed
from lightning_megatron.checkpoint.plain_data import load_plain
from lightning_megatron.checkpoint.schema import check_meta, is_meta
from lightning_megatron.errors import CheckpointError
from lightning_megatron.rank_zero import rank_zero_warn
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import as_path, is_remote
from lightning_megatron.storage.publish import PARTIAL, recover

SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Place of a checkpoint among those of its run, in the order in which they were written, whatever clocks say.

    A run begins a *line*. Each start that resumes from a checkpoint continues the line of that checkpoint, also if the
    line had gone on from there, and gets a higher number than every start whose checkpoints are beside its own.
    """

    line: str
    """Identifies the line; drawn at its first start."""
    start: int
    """Number of the start, from 1."""
    save: int = 0
    """Number of the save within the start, from 1; 0 before the first."""

    @classmethod
    def new(cls) -> Self:
        """Position before the first save of a new line."""
        return cls(line=uuid.uuid4().hex, start=1)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Self | None:
        """Position that ``meta.pt`` has; None for checkpoints without one, as those of older versions."""
        saved = meta.get("position")
        if not isinstance(saved, Mapping):
            return None
        line = saved.get("line")
        start = saved.get("start")
        save = saved.get("save")
        if isinstance(line, str) and isinstance(start, int) and isinstance(save, int):
            return cls(line=line, start=start, save=save)
        return None

    @property
    def order(self) -> tuple[int, int]:
        """Key by which positions of one line are sorted."""
        return self.start, self.save


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of optimizer steps before it was saved."""
    time: float
    """When it was saved, in seconds since the epoch."""
    has_optimizer: bool = True
    """Whether training can resume from it; False for ``save_weights_only``."""
    position: RunPosition | None = None
    """Place among the checkpoints of its run; None if it was written by an older version, or by no run."""


def check_reachable(folders: Iterable[Path]) -> None:
    """Raise if the object store of one of ``folders`` cannot be asked; writes nothing.

    Raises:
        CheckpointError: If the store refuses, or does not answer.
    """
    for folder in folders:
        with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
            folder.exists()


def check_writable(folders: Iterable[Path]) -> None:
    """Raise if it is certain that checkpoints cannot be saved in one of ``folders``, which need not exist yet.

    In an object store this writes and deletes a file, and the directory comes and goes with it: call it while no other
    process lists the directory.

    Raises:
        CheckpointError: If it, or its nearest parent that exists, is not a writable directory; in an object store, if
            this rank cannot write and delete a file there.
    """
    for folder in folders:
        if is_remote(folder):
            with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
                probe = folder / f".can_be_written_{uuid.uuid4().hex}"
                probe.write_bytes(b"")
                probe.unlink()
            continue
        path = folder.absolute()
        existing = next(each for each in (path, *path.parents) if each.exists())
        obstacle = ""
        if not existing.is_dir():
            obstacle = "not a directory"
        elif not os.access(existing, os.W_OK | os.X_OK):
            obstacle = "read-only"
        if obstacle:
            raise CheckpointError(
                f"checkpoints cannot be saved in {folder}: {existing} is {obstacle}; give another dirpath"
            )


def is_complete(path: Path) -> bool:
    """Whether ``path``, or what an interrupted save left of it, is a complete checkpoint."""
    try:
        check_complete(recover(path))
    except CheckpointError:
        return False
    return True


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a directory, including links and those that an interrupted save left under other names."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except FileNotFoundError:  # a directory of a store is gone as soon as its last file is
        paths = []
    names = set()
    for path in paths:
        stem, suffix, _ = path.name.partition(SUFFIX)
        if suffix:
            names.add(stem + suffix)
    return [folder / name for name in sorted(names)]


def was_never_finished(path: Path) -> bool:
    """Whether ``path`` is in an object store and lacks the file that is written last.

    On a disk such a checkpoint has another name until it is complete; a store has no renames.
    """
    return is_remote(path) and not (recover(path) / META).is_file()


def find_complete(
    paths: Iterable[Path], *, to_resume: bool = False
) -> tuple[list[CheckpointInfo], list[Path]]:
    """Complete checkpoints among ``paths``, and in a second list damaged and foreign ones.

    Links to a checkpoint that was being written when its run was killed, and paths that do not exist, are left out.

    Args:
        paths: Paths of checkpoints.
        to_resume: Leave out those with weights only, unless there are no others.
    """
    found: list[CheckpointInfo] = []
    others: list[Path] = []
    for path in paths:
        try:
            check_complete(recover(path))
            found.append(_checkpoint_info(path))
        except (CheckpointError, FileNotFoundError) as error:
            if is_complete(path):  # otherwise another process may have removed it
                rank_zero_warn(f"{error}. Skipped, although complete")
            was_begun = path.is_symlink() and Path(f"{path.resolve()}{PARTIAL}").exists()
            if (path.is_symlink() or path.exists()) and not was_begun:
                others.append(path)
    resumable = [info for info in found if info.has_optimizer]
    if to_resume and resumable:
        return resumable, others
    return found, others


def find_newest(
    path: str | Path,
    step: int | None = None,
    *,
    to_resume: bool = False,
) -> CheckpointInfo:
    """The checkpoint ``path``, or the one with most steps in the directory ``path``.

    Args:
        path: A checkpoint or a directory of some.
        step: Step of the checkpoint to take from the directory, or that the checkpoint must have.
        to_resume: Take one with weights only if the directory has no other.

    Raises:
        CheckpointError: If there is none.
    """
    # No shell has expanded a path in a YAML file.
    path = as_path(os.path.expanduser(str(path))).absolute()
    recovered = recover(path)
    others: list[Path] = []
    if (recovered / META).is_file() or not recovered.is_dir():
        check_complete(recovered)
        found = [_checkpoint_info(path)]
    else:
        found, others = find_complete(list_checkpoints(path), to_resume=to_resume)
    candidates = [each for each in found if step in (None, each.step)]
    if candidates:
        return newest(candidates)
    if found:
        steps = sorted({each.step for each in found})
        raise CheckpointError(
            f"{path} has no complete checkpoint of step={step}; those it has: {', '.join(map(str, steps))}"
        )
    kind = _foreign_kind(path)
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}; convert it with `lightning-megatron convert`")
    if others:
        names = ", ".join(each.name for each in others)
        raise CheckpointError(
            f"none of the checkpoints in {path} is complete: {names}; give another path"
        )
    check_complete(path)
    return _checkpoint_info(path)


def newest(found: Iterable[CheckpointInfo]) -> CheckpointInfo:
    """The checkpoint with most steps; among several, the last one saved."""
    candidates = list(found)
    most_steps = max(each.step for each in candidates)
    return last_saved(each for each in candidates if each.step == most_steps)


def last_saved(found: Iterable[CheckpointInfo]) -> CheckpointInfo:
    """The checkpoint that was saved last: within a line of starts by its counters, otherwise by the clock.

    A host's clock may be wrong, and a run that went back to an older checkpoint has written fewer steps since. Of
    several equal ones, such as a link and its target, the first is taken.
    """
    last_of_lines: dict[str, CheckpointInfo] = {}
    for each in found:
        line = str(each.path)
        if each.position is not None:
            line = each.position.line
        last = last_of_lines.setdefault(line, each)
        if is_later(each, last):
            last_of_lines[line] = each
    return max(last_of_lines.values(), key=lambda each: each.time)


def is_later(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Whether two checkpoints are of the same line, and ``one`` was written after ``other``."""
    if one.position is None or other.position is None:
        return False
    if one.position.line != other.position.line:
        return False
    return one.position.order > other.position.order


def continued(position: RunPosition, beside: Iterable[Path]) -> RunPosition:
    """Position of a start that resumes from a checkpoint at ``position``.

    Args:
        position: Of the checkpoint.
        beside: Paths of checkpoints, of which the start must follow those of the same line; others are ignored.
    """
    start = position.start
    for path in beside:
        try:
            other = _checkpoint_info(path).position
        except (CheckpointError, FileNotFoundError):  # damaged, unfinished or just removed
            continue
        if other is not None and other.line == position.line:
            start = max(start, other.start)
    return RunPosition(line=position.line, start=start + 1)


def is_checkpoint_within(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` resolves into one of ``folders`` and is a complete checkpoint, a link to one, or nothing.

    A path from a loaded state may lead anywhere: ``checkpoints/../../documents``.
    """
    target = path.resolve()
    resolved = target
    if path.is_symlink():
        resolved = path.parent.resolve() / path.name
    if not any(folder.resolve() in resolved.parents for folder in folders):
        return False
    return not recover(target).exists() or is_complete(target)


def _checkpoint_info(path: Path) -> CheckpointInfo:
    meta = recover(path) / META
    content = load_plain(meta)
    if not isinstance(content, dict):
        content = {}
    if is_meta(content):
        check_meta(content, path)
    lightning_state = content.get("lightning", {})
    return CheckpointInfo(
        path=path,
        step=int(lightning_state.get("global_step", 0)),
        time=float(content.get("time", meta.stat().st_mtime)),  # a copy has another mtime
        has_optimizer=bool(content.get("has_optimizer", True)),
        position=RunPosition.of(content),
    )


def _foreign_kind(path: Path) -> str | None:
    if (path / "config.json").is_file():
        return "a model of Hugging Face, which MegatronModule(model=, pretrained=True) loads"
    if (path / "weights" / BACKENDS).is_file():
        return "a checkpoint of NeMo 2"
    # One of ours that lost its meta.pt is damaged.
    if is_distributed(path) and path.suffix != SUFFIX:
        return "a checkpoint that another program wrote with Megatron-Core"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")):
        return "a checkpoint of Megatron-LM"
    return None
