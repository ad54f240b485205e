"""Resolve ``ckpt_path`` to a complete checkpoint, before any process is started. Lightning looks for names only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint.find import (
    Found,
    broken_names,
    check_local,
    find_newest,
    found_at,
    found_in,
    newest,
    preferred,
)
from lightning_megatron.errors import CheckpointError

if TYPE_CHECKING:
    import lightning.pytorch as pl

LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST + ModelCheckpoint.FILE_EXTENSION
_REQUEUED = "hpc_ckpt_*.ckpt*"
"""What Lightning names the checkpoints of SLURM's requeue signal (2.6.6, connectors/checkpoint_connector.py)."""


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
    saves_on_failure = any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.checkpoint_callbacks)
    if ckpt_path is None and fitting and saves_on_failure:
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
    was_requeued = fitting and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if requeued is not None and was_requeued and (ckpt_path != "last" or found is None or requeued.step >= found.step):
        rank_zero_info(f"this job was requeued: it goes on from {requeued.path}, not from ckpt_path={ckpt_path}")
        return str(requeued.path)
    return ckpt_path if found is None else str(found.path)


def find_last(trainer: pl.Trainer) -> Found | None:
    """What ``ckpt_path="last"`` means: the newest of what the Trainer's callbacks have left; None before the first.

    Of each callback that is its ``last.ckpt`` if it keeps one and has saved nothing with more steps since, otherwise
    the checkpoint with most steps in its folder. A run that shall go on takes one with only weights if there is no
    other.

    Raises:
        CheckpointError: If there are checkpoints and none is complete.
    """
    resumes = _resumes(trainer)
    found = [found_at(Path(trainer.default_root_dir) / LAST)]  # of SIGTERM
    broken: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            found.append(found_at(Path(callback.ckpt_path)))
        if not isinstance(callback, ModelCheckpoint):
            continue
        folder = folder_of(callback, trainer)
        complete = preferred(found_in(folder), resumes)
        lasts = [each for each in complete if re.match(callback.CHECKPOINT_NAME_LAST, each.path.name)]
        if lasts and callback.save_last:
            last = max(lasts, key=lambda each: each.time)
            # What has more steps and is older is of an earlier run.
            found.append(newest([last, *(each for each in complete if each.time >= last.time)]))
        elif complete:
            most = newest(complete)
            found.append(most)
            tell = rank_zero_warn if callback.save_last else rank_zero_info
            tell(
                f"{folder} keeps no complete {LAST} to begin with; {most.path.name} has most steps and takes its place"
            )
        else:
            broken += [str(folder / name) for name in broken_names(folder)]
    every = [each for each in found if each is not None]
    if not every and broken:
        raise CheckpointError(
            f"ckpt_path='last' finds no complete checkpoint, but {', '.join(broken)}; give ckpt_path another one, or "
            "remove them to begin anew"
        )
    return max(preferred(every, resumes), key=lambda each: each.time, default=None)


def is_of_requeue(path: Path) -> bool:
    """Whether SLURM's requeue signal has caused the checkpoint, so that a run goes on from it in every respect."""
    return path.match(_REQUEUED)


def folder_of(callback: ModelCheckpoint, trainer: pl.Trainer) -> Path:
    """Where ``callback`` keeps its checkpoints; known to itself only after its ``setup``."""
    if callback.dirpath is not None:
        return Path(callback.dirpath)
    if not trainer.loggers:
        return Path(trainer.default_root_dir) / "checkpoints"
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name) / version / "checkpoints"


def _resumes(trainer: pl.Trainer) -> bool:
    """Whether the run wants the optimizer's state, too."""
    return trainer.state.fn == TrainerFn.FITTING and not getattr(trainer.strategy, "load_weights_only", False)


def _find_requeued(root: Path) -> Found | None:
    found = [each for each in found_in(root) if is_of_requeue(each.path)]
    if found:
        return newest(found)
    if left := sorted(path.name for path in root.glob(_REQUEUED)):
        raise CheckpointError(
            f"{root} has no complete checkpoint of a requeued job, but {', '.join(left)}; remove it and give ckpt_path"
        )
    return None
