"""How does a run end that a scheduler stops? With a checkpoint that ``ckpt_path="last"`` finds, and exit code 143.

Lightning ends such a run with code 0 and without a checkpoint (2.6.6): ``SIGTERMException`` is a ``SystemExit``.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.ckpt_path import LAST, Found, find_last
from lightning_megatron.engine.checkpoint import is_own_within
from lightning_megatron.errors import CheckpointError

if TYPE_CHECKING:
    import lightning.pytorch as pl

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended; schedulers take it for a preemption, not for a failure."""

_PREEMPTED = "preempted.ckpt"
"""Beside ``last.ckpt`` where that is a link."""


def deferred_signums(environment: ClusterEnvironment) -> list[int]:
    """Signals for which Lightning registers handlers that communicate, and which therefore wait for a step's end."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return [signal.SIGTERM, environment.requeue_signal]
    return [signal.SIGTERM]


@dataclass(frozen=True, kw_only=True)
class Refuge:
    """Where a run that is stopped leaves its checkpoint."""

    path: Path
    """Of the checkpoint."""
    link: Path | None = None
    """What points to it afterwards."""
    is_found_beside_others: bool = True
    """Whether other checkpoints of this run will be found where it is, so that one of them may do."""

    def renew_link(self) -> None:
        """Have ``link`` point to ``path``, in one step; on one rank."""
        if self.link is not None:
            new = self.link.with_name(self.link.name + ".new")
            new.unlink(missing_ok=True)
            new.symlink_to(self.path.name)
            os.replace(new, self.link)


def refuge_of(trainer: pl.Trainer) -> Refuge | None:
    """Where ``ckpt_path="last"`` will look, in the next process too; None for a Trainer that keeps no checkpoints.

    Every rank must call.
    """
    keepers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    # Lightning's debugging setup gives the Trainer the attribute, where no type checker sees it.
    if not keepers or bool(getattr(trainer, "fast_dev_run", False)):
        return None
    keeper = next((each for each in keepers if each.save_last), keepers[0])
    folder = Path(str(keeper.dirpath))
    log_dir = trainer.log_dir if trainer.loggers else None
    if log_dir is not None and folder.is_relative_to(Path(log_dir).absolute()):
        # A folder of this one run's logs, where the next run will not look.
        return Refuge(path=Path(trainer.default_root_dir).absolute() / LAST, is_found_beside_others=False)
    last = Path(keeper.last_model_path or folder / LAST)
    if not is_own_within(last, [folder]):  # a loaded state may name anything
        last = folder / LAST
    keeper.last_model_path = str(last)  # so that the run that goes on replaces it
    if keeper.save_last == "link" and (last.is_symlink() or not last.exists()):
        return Refuge(path=folder / _PREEMPTED, link=last)
    return Refuge(path=last)


def last_of(trainer: pl.Trainer) -> Found | None:
    """What ``ckpt_path="last"`` would find now."""
    try:
        return find_last(trainer)
    except CheckpointError:
        return None
