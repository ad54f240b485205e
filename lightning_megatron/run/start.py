"""Which checkpoint a run begins with: ``ckpt_path``, and where preempted and requeued runs have saved."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import find
from lightning_megatron.errors import CheckpointError
from lightning_megatron.run.restarts import FIRST_START, is_of_this_run
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import as_path, is_remote

if TYPE_CHECKING:
    import lightning.pytorch as pl


LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST + ModelCheckpoint.FILE_EXTENSION
_PREEMPTED = "preempted.ckpt"
"""Name of the checkpoint saved on preemption where ``last.ckpt`` is a link."""
_REQUEUED = "hpc_ckpt_*.ckpt*"
"""Names of checkpoints that Lightning saves on SLURM's requeue signal (2.6.6, connectors/checkpoint_connector.py)."""


def find_checkpoint(trainer: pl.Trainer, ckpt_path: str | Path | None) -> str | Path | None:
    """Find the checkpoint that Lightning should load for ``ckpt_path``.

    Args:
        trainer: The Trainer that is about to fit, validate, test or predict.
        ckpt_path: The user's argument: a checkpoint, a directory of checkpoints (the newest is taken), a keyword of
            Lightning, or None.

    Returns:
        The path of a complete checkpoint; None or the keyword itself if there is nothing to load.

    Raises:
        CheckpointError: If the requested checkpoint is missing, was never finished, or is another program's.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    saves_on_failure = any(
        isinstance(callback, OnExceptionCheckpoint) for callback in trainer.checkpoint_callbacks
    )
    if ckpt_path is None and fitting and saves_on_failure:
        ckpt_path = "last"
    if fitting and FIRST_START in os.environ:
        own = find_last(trainer)
        if own is not None and is_of_this_run(own.time):
            return str(own.path)
    requeued = None
    if ckpt_path == "hpc" or SLURMEnvironment.detect():
        requeued = _find_requeued(as_path(trainer.default_root_dir))
    if ckpt_path == "":
        raise CheckpointError(
            "ckpt_path must not be empty; give the path of a *.ckpt, or leave it out"
        )
    if ckpt_path in (None, "hpc"):
        return ckpt_path if requeued is None else str(requeued.path)
    if ckpt_path == "best" or str(ckpt_path).startswith("registry"):
        has_best = any(
            getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks
        )
        if ckpt_path == "best" and not has_best and not getattr(trainer, "fast_dev_run", False):
            raise CheckpointError(
                "ckpt_path=best: expected a ModelCheckpoint of this Trainer that has saved, got none; give the path of "
                "a *.ckpt, or last"
            )
        return ckpt_path
    is_last = ckpt_path == "last"
    if is_last:
        found = find_last(trainer)
    else:
        found = find.find_newest(ckpt_path, to_resume=_needs_optimizer(trainer))
    was_requeued = fitting and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if requeued is not None and was_requeued:
        is_behind = found is not None and is_last and _is_newer(found, requeued)
        if not is_behind:
            rank_zero_info(
                f"this job was requeued: it resumes from {requeued.path}, not from ckpt_path={ckpt_path}"
            )
            return str(requeued.path)
    if found is not None:
        return str(found.path)
    if is_last and any(is_remote(path) for path in paths_of_last(trainer)):
        # Lightning would take a last.ckpt that was never finished.
        rank_zero_warn(
            "ckpt_path='last': there is no finished checkpoint yet; the run starts from the beginning"
        )
        return None
    return ckpt_path


def find_last(trainer: pl.Trainer) -> find.CheckpointInfo | None:
    """The checkpoint of ``ckpt_path="last"``: the newest of the Trainer's callbacks; None before the first.

    Its name need not be ``last.ckpt``, which a killed run may not have updated. Of one run and its restarts it is the
    one that was written last, by their counters, whatever clocks say; of several runs that of the latest, by the clock.
    An older checkpoint with more steps is from an earlier run, or from before the run went back. To resume, a
    weights-only checkpoint is taken only if there is no other.

    Raises:
        CheckpointError: If there are checkpoints and none is complete.
    """
    paths = dict.fromkeys(paths_of_last(trainer))
    found, incomplete = find.find_complete(paths, to_resume=_needs_optimizer(trainer))
    if found:
        return find.last_saved(found)
    unfinished = [path for path in incomplete if find.was_never_finished(path)]
    damaged = [path for path in incomplete if path not in unfinished]
    if unfinished:
        names = ", ".join(map(str, unfinished))
        rank_zero_warn(
            f"{names}: expected a finished checkpoint, got one whose run was ended meanwhile; it is ignored"
        )
    if damaged:
        names = ", ".join(map(str, damaged))
        raise CheckpointError(
            f"ckpt_path='last' finds no complete checkpoint, but {names}; give another, or remove it"
        )
    return None


def paths_of_last(trainer: pl.Trainer) -> list[Path]:
    """Where ``ckpt_path="last"`` looks: the checkpoints of all callbacks, and what a preempted run saves."""
    paths = [as_path(trainer.default_root_dir) / LAST]  # saved on SIGTERM
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, OnExceptionCheckpoint):
            paths.append(as_path(callback.ckpt_path))
    for saver in savers_of(trainer):
        for folder in _saver_folders(saver, trainer):
            paths += find.list_checkpoints(folder)
    return paths


def savers_of(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    """The Trainer's callbacks that save checkpoints as training goes on."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def preemption_path(trainer: pl.Trainer) -> Path | None:
    """Path where a preempted run saves, and ``ckpt_path="last"`` looks; None for a Trainer that keeps no checkpoints.

    Every rank must call.
    """
    savers = savers_of(trainer)
    # Lightning's debugging setup gives the Trainer the attribute, where no type checker sees it.
    if not savers or bool(getattr(trainer, "fast_dev_run", False)):
        return None
    saver = next((each for each in savers if each.save_last), savers[0])
    folder = as_path(str(saver.dirpath))
    log_dir = trainer.log_dir if trainer.loggers else None
    if log_dir is not None and folder.is_relative_to(as_path(log_dir).absolute()):
        # The log directory of this run alone, where the next run will not look.
        return as_path(trainer.default_root_dir).absolute() / LAST
    last = as_path(saver.last_model_path or folder / LAST)
    if saver.save_last == "link":
        # Lightning removes the target of a replaced link at once, perhaps before its replacement is complete.
        last = folder / _PREEMPTED
    try:
        with failures_as_errors(f"{last} cannot be looked up"):
            is_own = find.is_checkpoint_within(last, [folder])
    except CheckpointError:  # this rank's store does not answer; rank 0 decides where to save
        is_own = False
    if not is_own:  # a loaded state may name any path
        last = folder / LAST
    saver.last_model_path = str(last)  # so that the resumed run replaces it
    return last


def is_of_this_job(path: Path) -> bool:
    """Whether the checkpoint was saved on SLURM's requeue signal, or by an earlier start of a restarted run."""
    if path.match(_REQUEUED):
        return True
    return FIRST_START in os.environ and is_of_this_run(find.find_newest(path).time)


def requeued_checkpoints(root: Path) -> list[Path]:
    """Checkpoints in ``default_root_dir`` that were saved on SLURM's requeue signal."""
    return [path for path in find.list_checkpoints(root) if path.match(_REQUEUED)]


def _saver_folders(saver: ModelCheckpoint, trainer: pl.Trainer) -> list[Path]:
    """Directories in which ``saver`` keeps checkpoints, which it determines only in its ``setup``.

    Where a logger numbers its runs, those of all runs, since this run gets a new number.
    """
    if saver.dirpath is not None:
        return [as_path(saver.dirpath)]
    if not trainer.loggers:
        return [as_path(trainer.default_root_dir) / "checkpoints"]
    logger = trainer.loggers[0]
    runs = as_path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
    version = logger.version
    if isinstance(version, str) and not re.fullmatch(r"version_\d+", version):
        return [runs / version / "checkpoints"]
    return sorted(runs.glob("version_*/checkpoints"))


def _needs_optimizer(trainer: pl.Trainer) -> bool:
    """Whether the run loads the optimizer state of a checkpoint, too."""
    weights_only = getattr(trainer.strategy, "load_weights_only", False)
    return trainer.state.fn == TrainerFn.FITTING and not weights_only


def _is_newer(one: find.CheckpointInfo, requeued: find.CheckpointInfo) -> bool:
    """Whether a checkpoint is newer than that of a requeued job: by the counters of their line, else by steps."""
    if find.is_later(one, requeued):
        return True
    return one.step > requeued.step and not find.is_later(requeued, one)


def _find_requeued(root: Path) -> find.CheckpointInfo | None:
    found, _ = find.find_complete(requeued_checkpoints(root))
    if found:
        have_counters = all(each.position is not None for each in found)
        return find.last_saved(found) if have_counters else find.newest(found)
    left = sorted(path.name for path in root.glob(_REQUEUED))
    if left:
        raise CheckpointError(
            f"{root} has no complete checkpoint of a requeued job, but {', '.join(left)}; remove it and give ckpt_path"
        )
    return None
