"""Where does a run that resumes nothing get its weights? ``load_from``, as Megatron's ``--pretrained-checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.ckpt_path import check_local, find_newest
from lightning_megatron.engine import checkpoint
from lightning_megatron.engine.checkpoint import RunState
from lightning_megatron.engine.checkpoint_partial import load_for_new_run, load_what_fits, reload_masters
from lightning_megatron.errors import ConfigError

modules_with_weights: WeakSet[torch.nn.Module] = WeakSet()
"""Modules of this process that were trained, or have loaded a checkpoint: a later run goes on with what they have."""


@dataclass(frozen=True, kw_only=True)
class LoadFrom:
    """Where a new run takes its weights from. It counts steps and samples from 0.

    Args:
        path: A checkpoint, or a folder of some, of which the one with most steps counts.
        step: The checkpoint of the folder to take instead; of a single checkpoint, the step that it must be of.
        optimizer: Take the optimizer's moments along.
        strict: Refuse a checkpoint that lacks weights of the model or has others too; otherwise a warning lists them.
    """

    path: str
    step: int | None = None
    optimizer: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ConfigError: If they do not fit together.
        """
        if not self.path:
            raise ConfigError("load_from='' is no path; give a checkpoint or a folder of some, or leave load_from out")
        if self.optimizer and not self.strict:
            raise ConfigError("load_from: optimizer=True needs strict=True: weights that are new have no moments")

    def found(self) -> Path:
        """The checkpoint.

        Raises:
            CheckpointError: If it is missing or not complete.
        """
        return find_newest(check_local(self.path), self.step, to_resume=self.optimizer).path


def as_load_from(value: str | Path | LoadFrom | None) -> LoadFrom | None:
    """The options of a bare path."""
    return LoadFrom(path=str(value)) if isinstance(value, (str, Path)) else value


def load_weights(run: RunState, options: LoadFrom) -> None:
    """Load what ``options`` say into ``run``, inside the engine; every rank must call.

    Args:
        run: With the optimizer if there is one.
        options: What to load.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged, or of another model.
    """
    path = checkpoint.recover(options.found())
    meta = checkpoint.read_meta(path)
    if options.strict:
        load_for_new_run(run if options.optimizer else replace(run, optimizer=None), meta, path)
        rank_zero_info(f"The run begins with the weights of {path}")
    else:
        difference = load_what_fits(run, meta, path)
        if difference.missing or difference.superfluous:
            rank_zero_warn(
                f"The run begins with the weights of {path}, except for those that it has not and that keep their "
                f"initial values ({', '.join(difference.missing) or 'none'}); not used are "
                f"{', '.join(difference.superfluous) or 'none'}"
            )
    if run.optimizer is not None and not options.optimizer:
        reload_masters(run.optimizer)
