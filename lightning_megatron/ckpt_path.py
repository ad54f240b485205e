"""Which checkpoint does a run begin with? ``ckpt_path`` is looked up before any process is started, and must be whole.

Lightning looks for names only. What has the right name may be a link to a checkpoint that was never finished, and the
right one may have another name: a run can be killed between any two of the steps that save, link and remove. Nothing is
repaired here; the next save puts the names in order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.engine.checkpoint import recover
from lightning_megatron.engine.checkpoint_safety import META, check_complete, is_distributed, load_plain
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import PARTIAL

if TYPE_CHECKING:
    import lightning.pytorch as pl

_ENDING = ModelCheckpoint.FILE_EXTENSION
LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST + _ENDING
_REQUEUED = "hpc_ckpt_*.ckpt*"
"""What Lightning names the checkpoints of SLURM's requeue signal (2.6.6, connectors/checkpoint_connector.py)."""


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


def find_checkpoint(trainer: pl.Trainer, ckpt_path: str | Path | None) -> str | Path | None:
    """What Lightning shall take for ``ckpt_path``.

    Args:
        trainer: About to fit, validate, test or predict.
        ckpt_path: The user's argument: a checkpoint, a folder of checkpoints (the newest counts), a word of
            Lightning's, or None.

    Returns:
        The path of a complete checkpoint; None or the word itself if there is nothing to begin with.

    Raises:
        CheckpointError: If a checkpoint is asked for that is missing, was never finished, or is another program's.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    if (
        ckpt_path is None
        and fitting
        and any(isinstance(c, OnExceptionCheckpoint) for c in trainer.checkpoint_callbacks)
    ):
        ckpt_path = "last"
    requeued = None
    if ckpt_path == "hpc" or SLURMEnvironment.detect():
        requeued = _find_requeued(Path(trainer.default_root_dir))
    if ckpt_path in (None, "hpc"):
        return ckpt_path if requeued is None else str(requeued.path)
    if ckpt_path == "best" or str(ckpt_path).startswith("registry"):
        return ckpt_path
    if ckpt_path == "last":
        found = find_last(trainer)
    else:
        found = find_newest(check_local(str(ckpt_path)), to_resume=_resumes(trainer))
    if fitting and requeued is not None and _was_requeued() and (ckpt_path != "last" or _is_newer(requeued, found)):
        rank_zero_info(f"this job was requeued: it goes on from {requeued.path}, not from ckpt_path={ckpt_path}")
        return str(requeued.path)
    return ckpt_path if found is None else str(found.path)


def check_local(path: str | Path) -> Path:
    """``path``, unless it is an address.

    Raises:
        CheckpointError: If it is: ``Path`` would make it a folder named, say, ``s3:``.
    """
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is not on a file system, and a checkpoint is a folder that all ranks write and read; give a path "
            "on a disk that all nodes share, and copy the checkpoints from or to there"
        )
    return Path(path)


def find_newest(path: Path, step: int | None = None, *, to_resume: bool = False) -> Found:
    """The checkpoint ``path``, or the one with most steps in the folder ``path``.

    Args:
        path: A checkpoint or a folder of some.
        step: The one of the folder to take instead, or the step that the checkpoint must be of.
        to_resume: Take one with only weights if the folder has no other.

    Raises:
        CheckpointError: If there is none.
    """
    path = Path(os.path.expanduser(path)).absolute()  # no shell has read what stands in a YAML file
    own = recover(path)
    if (own / META).is_file() or not own.is_dir():
        check_complete(own)
        own_found = _found(path)
        if step not in (None, own_found.step):
            raise CheckpointError(f"checkpoint {path} is of step {own_found.step}, not of step={step}; leave step out")
        return own_found
    found = _preferred(complete_checkpoints(path), to_resume)
    if step is not None:
        found_there = [each for each in found if each.step == step]
        if not found_there:
            steps = ", ".join(str(step) for step in sorted({each.step for each in found})) or "none"
            raise CheckpointError(f"{path} has no complete checkpoint of step={step}; those it has: {steps}")
        return max(found_there, key=lambda each: each.time)
    if found:
        return _newest(found)
    if (program := _other_program(path)) is not None:
        raise CheckpointError(f"{path} is {program}; convert it with `lightning-megatron convert`")
    if broken := _broken_names(path):
        raise CheckpointError(f"none of the checkpoints in {path} is complete: {', '.join(broken)}")
    check_complete(path)
    return _found(path)


def find_last(trainer: pl.Trainer) -> Found | None:
    """What ``ckpt_path="last"`` means: the newest of what the Trainer's callbacks have left; None before the first.

    Of each callback that is its ``last.ckpt`` if it keeps one and has saved nothing with more steps since, otherwise
    the checkpoint with most steps in its folder. A run that shall go on takes one with only weights if there is no
    other.

    Raises:
        CheckpointError: If there are checkpoints and none is complete.
    """
    root = Path(trainer.default_root_dir)
    found = [_found(root / LAST)] if _is_complete(root / LAST) else []  # of SIGTERM
    broken: list[str] = []
    resumes = _resumes(trainer)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint) and _is_complete(Path(callback.ckpt_path)):
            found.append(_found(Path(callback.ckpt_path)))
        if not isinstance(callback, ModelCheckpoint):
            continue
        folder = folder_of(callback, trainer)
        complete = _preferred(complete_checkpoints(folder), resumes)
        lasts = [each for each in complete if re.match(callback.CHECKPOINT_NAME_LAST, each.path.name)]
        if lasts and callback.save_last:
            last = max(lasts, key=lambda each: each.time)
            # What has more steps and is older is of an earlier run.
            found.append(_newest([last, *(each for each in complete if each.time >= last.time)]))
        elif complete:
            found.append(_newest(complete))
            tell = rank_zero_warn if callback.save_last else rank_zero_info
            instead = f"{found[-1].path.name} has most steps and takes its place"
            tell(f"{folder} keeps no complete {LAST} to begin with; {instead}")
        else:
            broken += [str(folder / name) for name in _broken_names(folder)]
    if not found and broken:
        raise CheckpointError(
            f"ckpt_path='last' finds no complete checkpoint, but {', '.join(broken)}; give ckpt_path another one, or "
            "remove them to begin anew"
        )
    return max(_preferred(found, resumes), key=lambda each: each.time, default=None)


def _resumes(trainer: pl.Trainer) -> bool:
    """Whether the run wants the optimizer's state, too."""
    return trainer.state.fn == TrainerFn.FITTING and not getattr(trainer.strategy, "load_weights_only", False)


def _preferred(found: Iterable[Found], to_resume: bool) -> list[Found]:
    """``found`` without those that have only weights, unless there are no others or they will do."""
    every = list(found)
    whole = [each for each in every if each.has_optimizer]
    return whole if to_resume and whole else every


def folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> Path:
    """Where ``callback`` keeps its checkpoints; known to itself only after its ``setup``."""
    if callback.dirpath is not None:
        return Path(callback.dirpath)
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "checkpoints"
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version / "checkpoints"


def complete_checkpoints(folder: Path) -> Iterator[Found]:
    """The complete checkpoints in ``folder``, links among them."""
    for name in _names(folder):
        try:
            check_complete(recover(folder / name))
        except CheckpointError:
            continue
        try:
            yield _found(folder / name)
        except (CheckpointError, FileNotFoundError) as error:
            if _is_complete(folder / name):  # else another process has removed it meanwhile
                rank_zero_warn(f"{error}. It is passed over, though its folder has all files")


def check_writable(folders: Iterable[Path]) -> None:
    """Raise if checkpoints surely cannot be saved in one of ``folders``, which need not exist yet.

    Raises:
        CheckpointError: If it, or what is there of the path to it, is no folder or must not be written.
    """
    for folder in folders:
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            obstacle = "read-only" if there.is_dir() else "no folder"
            raise CheckpointError(
                f"checkpoints cannot be saved in {folder}: {there} is {obstacle}; give another dirpath or "
                "default_root_dir, or Trainer(enable_checkpointing=False)"
            )


def is_of_requeue(path: Path) -> bool:
    """Whether SLURM's requeue signal has caused the checkpoint, so that a run goes on from it in every respect."""
    return path.match(_REQUEUED)


def _find_requeued(root: Path) -> Found | None:
    found = [each for each in complete_checkpoints(root) if is_of_requeue(each.path)]
    if found:
        return _newest(found)
    if left := sorted(path.name for path in root.glob(_REQUEUED)):
        raise CheckpointError(
            f"{root} has no complete checkpoint of a requeued job, but {', '.join(left)}; remove it and give ckpt_path"
        )
    return None


def _was_requeued() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _is_newer(a: Found, b: Found | None) -> bool:
    return b is None or a.step >= b.step


def _newest(found: list[Found]) -> Found:
    return max(found, key=lambda each: (each.step, each.time))


def _names(folder: Path) -> list[str]:
    """The checkpoints in ``folder``, also those of which only what an interrupted save left beside them is there."""
    present = [path.name.partition(_ENDING) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted({stem + ending for stem, ending, _ in present if ending})


def _broken_names(folder: Path) -> list[str]:
    """Checkpoints that are damaged or foreign; not links to one that was being written when its run was killed."""
    named = [folder / name for name in _names(folder) if os.path.lexists(folder / name)]
    return [path.name for path in named if not _is_complete(path) and not _was_begun(path)]


def _was_begun(path: Path) -> bool:
    return path.is_symlink() and Path(f"{path.resolve()}{PARTIAL}").exists()


def _is_complete(path: Path) -> bool:
    try:
        check_complete(recover(path))
    except CheckpointError:
        return False
    return True


def _found(path: Path) -> Found:
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
    if is_distributed(path) and path.suffix != _ENDING:  # one of ours that lost its meta.pt is damaged
        return "a checkpoint that another program wrote with Megatron-Core"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")):
        return "a checkpoint of Megatron-LM"
    return None
