"""Lightning's checkpoint hooks: save and load Megatron's shards beside Lightning's dict; and preemption, which saves.

Lightning ends a run on SIGTERM with code 0 and without a checkpoint (2.6.6: ``SIGTERMException`` is a ``SystemExit``).
Here it ends with a checkpoint that ``ckpt_path="last"`` finds, and exit code 143.

A signal handler runs wherever the program happens to be, which on a Megatron rank is nearly always in the middle of
some communication. Lightning's handlers communicate themselves (trainer/connectors/signal_connector.py: SIGTERM
broadcasts, SLURM's requeue signal saves a checkpoint), and ranks that are at different places then wait for each other
for ever. Here a signal is only noted; the handlers that were registered run between two batches, on all ranks at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import files
from lightning_megatron.checkpoint.load import LoadFrom, load_initial_weights, resume
from lightning_megatron.checkpoint.save import HostMemory, RunState, Save, preallocate
from lightning_megatron.data.loader import ResumableLoader
from lightning_megatron.engine.collectives import raise_on_all_ranks, wait_for_all_ranks
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.errors import TERMINATED, CheckpointError, ConfigError, NonFiniteError, NumericsError
from lightning_megatron.files import as_path, is_remote, remove, wait_for_deletions
from lightning_megatron.megatron_datamodule import MegatronDataModule
from lightning_megatron.restarts import FIRST_START, is_of_this_run

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.strategy import MegatronStrategy


_FAILURE_WAIT = timedelta(seconds=30)
"""How long a rank that has failed waits for the others to fail, too, where a callback then saves."""

LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST + ModelCheckpoint.FILE_EXTENSION
_PREEMPTED = "preempted.ckpt"
"""Beside ``last.ckpt`` where that is a link."""
_REQUEUED = "hpc_ckpt_*.ckpt*"
"""What Lightning names the checkpoints of SLURM's requeue signal (2.6.6, connectors/checkpoint_connector.py)."""

modules_with_weights: WeakSet[torch.nn.Module] = WeakSet()
"""Modules of this process that were trained, or have loaded a checkpoint: a later run goes on with what they have."""


class Checkpointing:
    """The checkpoints of a strategy's runs: which one a run begins with, what it saves, and when it must save.

    Saves are one at a time. A checkpoint that replaces an older one is worth nothing before it is complete, so what
    Lightning asks to remove in the meantime stays until then. A save that fails costs nothing but itself: older
    checkpoints are still there, and the next save is tried as if nothing had happened.
    """

    def __init__(
        self, strategy: MegatronStrategy, *, load_from: LoadFrom | str | Path | None, async_save: bool
    ) -> None:
        """Begin without any run.

        Args:
            strategy: Whose hooks call this object.
            load_from: As ``MegatronStrategy``.
            async_save: As ``MegatronStrategy``.
        """
        self._strategy = strategy
        self._load_from = LoadFrom(path=str(load_from)) if isinstance(load_from, (str, Path)) else load_from
        self._asynchronous = async_save
        self.is_preempted = False
        self._beginning: str | None = None
        """The checkpoint that the Trainer loads in this run."""
        self._trainer: pl.Trainer
        self._run: RunState
        self._signals: DeferredSignals
        self._is_trained: bool
        self._first_step: int | None
        """``global_step`` when training began; None before."""
        self._loader_state: dict[str, Any] | None = None
        """Where the training data goes on, until its loader is made."""
        self._memory = HostMemory(in_place=not async_save)
        self.saving: Save | None = None
        """The save that is under way."""
        self._asked_about: Save | None = None
        """The save that the ranks spoke of at the step before."""
        self._failure: ConfigError | None = None
        """Why the last save has failed; None if it has not."""
        self._removals: list[Path] = []
        """What Lightning has asked to remove."""
        self._written: set[Path] = set()
        self._steps: dict[Path, int] = {}
        """The steps of this run's checkpoints with an optimizer, that which it began with included."""

    def begin(self, trainer: pl.Trainer, environment: ClusterEnvironment, group: dist.ProcessGroup) -> None:
        """Forget the run before, whose checkpoints stay; every rank must call.

        Args:
            trainer: Of the run that begins.
            environment: Tells which signals are acted on between two steps.
            group: All ranks, on the hosts.
        """
        self._trainer = trainer
        self._signals = DeferredSignals(environment, group)
        self._is_trained, self._first_step = False, None
        self._failure, self._removals, self._steps = None, [], {}

    def end(self) -> None:
        """Give up a save that is under way, and what saves have taken. Does not communicate."""
        self._abandon()
        wait_for_deletions()
        self._memory.release()

    def take_loader_state(self) -> dict[str, Any] | None:
        """Where the training data goes on, once; None if it begins."""
        state, self._loader_state = self._loader_state, None
        return state

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        """Save the run beside Lightning's dict, after the save that is still under way; every rank must call.

        Raises:
            CheckpointError: If the dict holds more than plain data; if the run ends with this save, and it fails.
        """
        begin = time.monotonic()
        self._end_unless_all_ranks_save(filepath)
        state = self._trainer.state
        is_training = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        # Whether no later step of this run would save again, should this save fail.
        is_final = not is_training or self._signals.is_delivering or self._is_trained
        self.finish()
        saving = Save(self._run, checkpoint, self._strategy.broadcast(str(filepath)))
        self._removals = [each for each in self._removals if each != saving.path]
        with self._failures(is_final):
            saving.start(self._memory)
            self.saving = saving
            if "optimizer_states" in checkpoint:
                self._steps[saving.path] = checkpoint["global_step"]
        if is_final or not self._asynchronous:
            self.finish(is_final=is_final)
        if is_final:
            self.end()
        progress.saves.append(time.monotonic() - begin)

    def finish(self, *, is_final: bool = False) -> None:
        """Complete the save that is under way, if there is one; waits for the files of all ranks.

        Args:
            is_final: Whether the run ends here.

        Raises:
            CheckpointError: If the run ends, and its last save fails or has failed before.
        """
        saving, self.saving = self.saving, None
        if saving is None:
            if is_final and self._failure is not None:
                raise self._failure
            return
        with self._failures(is_final):
            saving.finish()
            if self._asynchronous:
                rank_zero_info(saving.report())
            self._failure = None
            self._written.add(saving.path)
            self._remove_what_is_replaced()

    @contextlib.contextmanager
    def _failures(self, is_final: bool) -> Iterator[None]:
        """Warn of what goes wrong, unless the run ends with it."""
        try:
            yield
        except ConfigError as error:
            if is_final:
                raise
            self._failure = error
            rank_zero_warn(f"{error}. The run goes on, older checkpoints stay, and the next save is tried as usual")

    def _abandon(self) -> None:
        """Give the save that is under way up: other ranks may never come to complete it. Does not communicate."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.abandon()
            rank_zero_warn(f"checkpoint {saving.path} is not written: the run failed before all ranks had finished it")

    def remove(self, path: Path) -> None:
        """Remove a checkpoint that a newer one replaces, as soon as none that may is under way or has failed."""
        self._removals.append(path)
        if self.saving is None and self._failure is None:
            self._remove_what_is_replaced()

    def _remove_what_is_replaced(self) -> None:
        removals, self._removals = self._removals, []
        folders = self._checkpoint_folders
        for path in removals if self._strategy.is_global_zero else ():
            try:
                # Lightning may know the path from a state that it has loaded.
                if path in self._written or files.is_checkpoint_within(path, folders):
                    remove(path)
                elif path.is_symlink() or path.exists():
                    where = " or ".join(map(str, folders))
                    rank_zero_warn(f"{path} stays: it is no complete checkpoint within {where}; remove it by hand")
            except OSError as error:
                rank_zero_warn(f"checkpoint {path} could not be removed: {error}; remove it by hand")

    @property
    def _checkpoint_folders(self) -> list[Path]:
        """Where the Trainer's callbacks keep checkpoints, once they are set up."""
        callbacks = self._trainer.checkpoint_callbacks
        folders = (getattr(callback, "dirpath", None) for callback in callbacks)
        return [as_path(folder) for folder in folders if folder is not None]

    def _end_unless_all_ranks_save(self, path: str | Path) -> None:
        """Go on with the failure that callbacks like ``OnExceptionCheckpoint`` save after, if it is not all ranks'.

        Otherwise this rank would wait for the others, and they for it, and nobody would hear of the failure.
        """
        failure = sys.exc_info()[1]
        is_after_failure = self._trainer.state.status == TrainerStatus.INTERRUPTED
        if failure is None or not is_after_failure or isinstance(failure, SIGTERMException):
            return
        if not wait_for_all_ranks(_FAILURE_WAIT):
            self._abandon()
            reason = f"not all ranks have failed within {_FAILURE_WAIT.seconds} s, and one alone cannot save"
            warnings.warn(f"checkpoint {path} is not written: {reason}", stacklevel=2)
            raise failure

    def at_step_boundary(self) -> None:
        """Act on signals, and complete a save that is written; all ranks call it between two batches."""
        is_written = self.saving is not None and self.saving.is_written()
        asked_about, self._asked_about = self._asked_about, self.saving
        all_written = self._signals.deliver(is_written)
        if all_written and asked_about is not None and asked_about is self.saving:
            self.finish()

    def on_train_start(self) -> None:
        """Note the step that training begins with, and get memory for saves beside training."""
        trainer, batches = self._trainer, self._trainer.num_val_batches
        self._first_step = trainer.global_step
        keepers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        for monitor in (each.monitor for each in keepers if (each.monitor or "").startswith("val_")):
            if not (sum(batches) if isinstance(batches, list) else batches):  # Lightning then saves nothing silently
                rank_zero_warn(
                    f"ModelCheckpoint(monitor={monitor!r}): expected validation, got a run without; it saves nothing, "
                    "or with save_last at the end only; leave monitor out and set every_n_train_steps"
                )
        names = {(each.dirpath, each.filename) for each in keepers}
        if self._asynchronous and len(names) < len(keepers):
            self._asynchronous = False  # Lightning gives another name only where it sees the file of the first
            rank_zero_warn(
                "async_save=True: expected a filename or dirpath of its own for each ModelCheckpoint, got the same for "
                "two, which would overwrite each other's checkpoints; saves are waited for until each has one"
            )
        if self._asynchronous and keepers and not getattr(trainer, "fast_dev_run", False):
            with_optimizer = not all(keeper.save_weights_only for keeper in keepers)
            preallocate(self._run if with_optimizer else self._run.weights_only(), self._memory)

    def on_train_end(self) -> None:
        """Complete the last save.

        Raises:
            CheckpointError: If it has failed, or an earlier one has and none after it has been tried.
        """
        self._run.settle()
        self._is_trained, self._first_step = True, None
        self.finish(is_final=True)

    def on_exception(self, exception: BaseException) -> None:
        """Save before the exit that SIGTERM asks for; give up a save under way where other ranks may never come."""
        # These are raised on all ranks at the same place. After any other one, also of ours (one rank alone may have
        # read a bad sample), the ranks cannot be told to meet again.
        if not isinstance(exception, (SIGTERMException, NonFiniteError, NumericsError)):
            self._abandon()
            return
        if self.saving is not None:
            self.finish(is_final=True)
        if not isinstance(exception, SIGTERMException):
            return
        trainer = self._trainer
        news = f"SIGTERM at step {trainer.global_step}: the run ends with code {TERMINATED}"
        path = None if self._first_step in (None, trainer.global_step) else preemption_path(trainer)
        if path is not None:
            trainer.save_checkpoint(path)
        saved = "with nothing to save" if path is None else f"its checkpoint is {path}, go on with ckpt_path='last'"
        rank_zero_info(f"{news}; {saved}")
        exception.code = TERMINATED
        self.is_preempted = True

    # ---- beginning --------------------------------------------------------------------------------------------------

    def resolve_ckpt_path(self, trainer: pl.Trainer, ckpt_path: str | Path | None) -> str | Path | None:
        """The checkpoint that a run begins with; called by the launcher before there are other processes.

        Args:
            trainer: About to run.
            ckpt_path: As the user gave it.

        Raises:
            CheckpointError: If a checkpoint is missing or not complete, or the store it is to be saved in refuses.
        """
        savers = trainer.checkpoint_callbacks if trainer.state.fn in (None, TrainerFn.FITTING) else ()
        folders = [as_path(getattr(callback, "dirpath", None) or trainer.default_root_dir) for callback in savers]
        files.check_writable(each for each in folders if is_remote(each))  # before Lightning's callbacks look there
        found = find_checkpoint(trainer, ckpt_path)
        self._beginning = None if found is None or found == "last" else str(found)  # "last" means that there is none
        is_new = self._beginning is None and self._strategy.lightning_module not in modules_with_weights
        if self.initial_weights is not None and is_new:
            self.initial_weights.resolve()
        return found

    def setup(self, run: RunState, *, fitting: bool) -> None:
        """Take the live objects of a run, and load what ``load_from`` says if the model has only its initial weights.

        Every rank must call, inside the engine.

        Raises:
            CheckpointError: If that fails, the ranks have not found the same checkpoint to resume from, or the run
                could not save its own.
        """
        self._run = run
        module, of_rank_0 = self._trainer.lightning_module, self._strategy.broadcast(self._beginning)
        with raise_on_all_ranks():
            if self._beginning != of_rank_0:
                raise CheckpointError(
                    f"this rank would begin with {self._beginning or 'no checkpoint'} and rank 0 with "
                    f"{of_rank_0 or 'none'}; keep checkpoints on a file system that all nodes share"
                )
            if fitting and not getattr(module.trainer, "fast_dev_run", False):
                files.check_writable(self._checkpoint_folders)
        source = self.initial_weights
        if source is not None and self._beginning is None and module not in modules_with_weights:
            load_initial_weights(run if fitting else replace(run, optimizer=None), source)
        if fitting or source is not None:
            modules_with_weights.add(module)

    @property
    def initial_weights(self) -> LoadFrom | None:
        """What a new run's weights come from: the option of this strategy, else the module's own checkpoint."""
        return self._load_from or getattr(self._strategy.lightning_module, "load_from", None)

    def load(self, checkpoint_path: str | Path) -> dict[str, Any]:
        """Load a checkpoint into the run, and return Lightning's dict; every rank must call."""
        path = as_path(self._strategy.broadcast(str(checkpoint_path)))
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        fitting = trainer.state.fn == TrainerFn.FITTING
        goes_on = fitting and (not self._strategy.load_weights_only or _is_of_this_job(path))
        run = self._run if goes_on else replace(self._run, optimizer=None)
        modules_with_weights.add(trainer.lightning_module)
        self.finish()
        with self._strategy.engine():
            loaded = resume(run, path)
            if fitting and not goes_on and self._run.optimizer is not None:
                self._run.optimizer.inner.reload_model_params()  # its own copies of the weights
        if not goes_on:
            return _only_weights(loaded, datamodule) if fitting else loaded
        # A data module without max_epochs goes on in its one long epoch.
        if _loader_state(loaded) is not None or (trainer.max_epochs or -1) >= 0:
            _close_finished_epoch(loaded)
        _check_place_in_data(loaded, datamodule, path)
        if 0 <= trainer.max_steps <= loaded["global_step"]:
            left = f"max_steps={trainer.max_steps}: nothing is left to do; raise max_steps to train on"
            rank_zero_info(f"checkpoint {path} is of step {loaded['global_step']}, and {left}")
        self._steps[path] = loaded["global_step"]
        for optimizer, state in zip(self._strategy.optimizers, loaded["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
        # Lightning takes the training data up only in the middle of what it counts as an epoch.
        place, loader = _loader_state(loaded), trainer.train_dataloader
        if place is not None and isinstance(loader, ResumableLoader):
            loader.load_state_dict(place)  # someone asked for it already, as for trainer.estimated_stepping_batches
        else:
            self._loader_state = place
        return loaded

    def roll_back(self, *, before: int) -> dict[str, Any] | None:
        """Load this run's newest checkpoint from before a step, while training; every rank must call.

        Samples and the count of steps go on; weights, optimizer, random states and learning rates are loaded.

        Returns:
            Lightning's dict of it; None if there is none.

        Raises:
            CheckpointError: If it is damaged.
        """
        self._run.settle()
        self.finish()
        known = sorted(self._steps.items(), key=lambda entry: entry[1], reverse=True)
        # Only rank 0 looks: Lightning may have had some removed.
        found = (str(path) for path, step in known if step < before and files.is_complete(path))
        path = self._strategy.broadcast(next(found, None) if self._strategy.is_global_zero else None)
        if path is None:
            return None
        with self._strategy.engine():
            loaded = resume(self._run, as_path(path))
        configs = self._trainer.lr_scheduler_configs
        for config, state in zip(configs, loaded["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        return loaded


# ---- signals ---------------------------------------------------------------------------------------------------------


class DeferredSignals:
    """Notes signals and delivers them to their handlers where every rank has come to."""

    def __init__(self, environment: ClusterEnvironment, group: dist.ProcessGroup) -> None:
        """Defer those for which Lightning registers handlers that communicate, from the first ``deliver`` on.

        Args:
            environment: SLURM's has a signal of its own.
            group: All ranks, over gloo: the question must not wait for a GPU.
        """
        self._signums: tuple[int, ...] = (signal.SIGTERM,)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            self._signums += (environment.requeue_signal,)
        self._group = group
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: set[int] = set()
        self._question: tuple[dist.Work, torch.Tensor] | None = None
        self.is_delivering = False
        """Whether handlers run."""

    def deliver(self, done: bool = False) -> bool:
        """Run the handlers of signals that any rank had noted at the call before; every rank must call.

        The answer travels while the batch in between is worked on, so nothing waits for it.

        Args:
            done: Something that this rank has to say to the others.

        Returns:
            Whether all ranks said ``done`` at the call before.
        """
        self._stand_in_for_handlers()
        some_not_done, *noted = [True, *(False for _ in self._signums)]
        if self._question is not None:
            work, flags = self._question
            work.wait()
            some_not_done, *noted = flags.tolist()
        flags = torch.tensor([not done, *(signum in self._noted for signum in self._signums)], dtype=torch.uint8)
        self._noted.clear()
        self._question = (dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True), flags)
        self.is_delivering = True
        try:
            for signum, is_noted in zip(self._signums, noted, strict=True):
                if is_noted and signum in self._handlers:
                    self._handlers[signum](signum, None)
        finally:
            self.is_delivering = False
        return not some_not_done

    def _stand_in_for_handlers(self) -> None:
        """Take the place of handlers that Lightning has registered since; it puts back what was there before itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            handler = signal.getsignal(signum)
            if callable(handler) and handler != self._note:
                self._handlers[signum] = handler
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted.add(signum)


# ---- which checkpoint a run begins with ---------------------------------------------------------------------------


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
    if fitting and FIRST_START in os.environ and (own := find_last(trainer)) is not None and is_of_this_run(own.time):
        return str(own.path)
    in_slurm = ckpt_path == "hpc" or SLURMEnvironment.detect()
    requeued = _find_requeued(as_path(trainer.default_root_dir)) if in_slurm else None
    if ckpt_path == "":
        raise CheckpointError("ckpt_path must not be empty; give the path of a *.ckpt, or leave it out")
    if ckpt_path in (None, "hpc"):
        return ckpt_path if requeued is None else str(requeued.path)
    if ckpt_path == "best" or str(ckpt_path).startswith("registry"):
        has_best = any(getattr(callback, "best_model_path", "") for callback in trainer.checkpoint_callbacks)
        if ckpt_path == "best" and not has_best and not getattr(trainer, "fast_dev_run", False):
            raise CheckpointError(
                "ckpt_path=best: expected a ModelCheckpoint of this Trainer that has saved, got none; give the path of "
                "a *.ckpt, or last"
            )
        return ckpt_path
    is_last = ckpt_path == "last"
    found = find_last(trainer) if is_last else files.find_newest(ckpt_path, to_resume=_resumes(trainer))
    was_requeued = fitting and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if requeued is not None and was_requeued and (not is_last or found is None or requeued.step >= found.step):
        rank_zero_info(f"this job was requeued: it goes on from {requeued.path}, not from ckpt_path={ckpt_path}")
        return str(requeued.path)
    return ckpt_path if found is None else str(found.path)


def find_last(trainer: pl.Trainer) -> files.CheckpointInfo | None:
    """What ``ckpt_path="last"`` means: the newest of what the Trainer's callbacks have left; None before the first.

    Its name need not be ``last.ckpt``, which a run that was killed has perhaps not renewed. What has more steps and is
    older is of an earlier run. A run that shall go on takes one with only weights if there is no other.

    Raises:
        CheckpointError: If there are checkpoints and none is complete.
    """
    callbacks = trainer.checkpoint_callbacks
    keepers = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
    places = [as_path(trainer.default_root_dir) / LAST]  # of SIGTERM
    places += [as_path(each.ckpt_path) for each in callbacks if isinstance(each, OnExceptionCheckpoint)]
    for folder in (each for keeper in keepers for each in _folders_of(keeper, trainer)):
        places += files.list_checkpoints(folder)
    found, others = files.find_complete(dict.fromkeys(places), to_resume=_resumes(trainer))
    if not found and others:
        names = ", ".join(map(str, others))
        raise CheckpointError(f"ckpt_path='last' finds no complete checkpoint, but {names}; give another, or remove it")
    return max(found, key=lambda each: each.time, default=None)


def preemption_path(trainer: pl.Trainer) -> Path | None:
    """Where a run that is stopped saves, and ``ckpt_path="last"`` looks; None for a Trainer that keeps no checkpoints.

    Every rank must call.
    """
    keepers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    # Lightning's debugging setup gives the Trainer the attribute, where no type checker sees it.
    if not keepers or bool(getattr(trainer, "fast_dev_run", False)):
        return None
    keeper = next((each for each in keepers if each.save_last), keepers[0])
    folder = as_path(str(keeper.dirpath))
    log_dir = trainer.log_dir if trainer.loggers else None
    if log_dir is not None and folder.is_relative_to(as_path(log_dir).absolute()):
        # A folder of this one run's logs, where the next run will not look.
        return as_path(trainer.default_root_dir).absolute() / LAST
    # Lightning removes what a link replaces at once, perhaps before what replaces it is complete.
    last = folder / _PREEMPTED if keeper.save_last == "link" else as_path(keeper.last_model_path or folder / LAST)
    if not files.is_checkpoint_within(last, [folder]):  # a loaded state may name anything
        last = folder / LAST
    keeper.last_model_path = str(last)  # so that the run that goes on replaces it
    return last


def _is_of_this_job(path: Path) -> bool:
    """Whether SLURM's requeue signal has caused the checkpoint, or an earlier start of a run that was started again."""
    return path.match(_REQUEUED) or (FIRST_START in os.environ and is_of_this_run(files.find_newest(path).time))


def _folders_of(keeper: ModelCheckpoint, trainer: pl.Trainer) -> list[Path]:
    """Where ``keeper`` keeps its checkpoints, which it only knows itself after its ``setup``.

    Where a logger numbers its runs, it is that of each: the number of this run is a new one.
    """
    if keeper.dirpath is not None:
        return [as_path(keeper.dirpath)]
    if not trainer.loggers:
        return [as_path(trainer.default_root_dir) / "checkpoints"]
    logger = trainer.loggers[0]
    runs, version = as_path(logger.save_dir or trainer.default_root_dir) / str(logger.name), logger.version
    if isinstance(version, str) and not re.fullmatch(r"version_\d+", version):
        return [runs / version / "checkpoints"]
    return sorted(runs.glob("version_*/checkpoints"))


def _resumes(trainer: pl.Trainer) -> bool:
    """Whether the run wants the optimizer's state, too."""
    return trainer.state.fn == TrainerFn.FITTING and not getattr(trainer.strategy, "load_weights_only", False)


def _find_requeued(root: Path) -> files.CheckpointInfo | None:
    found, _ = files.find_complete(each for each in files.list_checkpoints(root) if each.match(_REQUEUED))
    if found:
        return files.newest(found)
    if left := sorted(path.name for path in root.glob(_REQUEUED)):
        raise CheckpointError(
            f"{root} has no complete checkpoint of a requeued job, but {', '.join(left)}; remove it and give ckpt_path"
        )
    return None


# ---- Lightning's dict -----------------------------------------------------------------------------------------------

_TRAINING_STATE = ("loops", "callbacks", "lr_schedulers", "optimizer_states")


def _only_weights(lightning_state: Mapping[str, Any], datamodule: object) -> dict[str, Any]:
    """Lightning's dict as of a run that has not begun: no steps, callbacks, schedules or place in the data.

    Args:
        lightning_state: The dict of a checkpoint.
        datamodule: This run's, whose state in the dict is its place in the data; None if there is none.
    """
    dropped = (*_TRAINING_STATE, type(datamodule).__qualname__)
    fresh = {k: v for k, v in lightning_state.items() if k not in dropped}
    return {**fresh, "epoch": 0, "global_step": 0, "lr_schedulers": [], "optimizer_states": []}


def _loader_state(lightning_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where the training data stood, if there was one ``ResumableLoader``."""
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    states = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states[0] if len(states) == 1 and "random_state" in states[0] else None


def _check_place_in_data(lightning_state: dict[str, Any], datamodule: object, path: Path) -> None:
    """Compare whose place in the training data a checkpoint holds with the run's data; take out what is of no use.

    Raises:
        CheckpointError: If both have a data module, of different kinds.
    """
    here = type(datamodule).__qualname__ if isinstance(datamodule, MegatronDataModule) else None
    states = {name: state for name, state in lightning_state.items() if isinstance(state, Mapping)}
    # A conversion writes the state of each of our data modules, without an order.
    there = [name for name, state in states.items() if state.get("train_order") is not None]
    if here in states or not (here or there):
        return
    if here and there:
        raise CheckpointError(
            f"data of checkpoint {path}: expected {here}, got {' or '.join(there)}; resume with the same kind, or "
            "begin a new run with the weights: MegatronStrategy(load_weights_only=True)"
        )
    lightning_state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
    rank_zero_warn(f"{path} holds no place in the data of {here or 'this loader'}: the training data begins anew")


def _close_finished_epoch(lightning_state: Mapping[str, Any]) -> None:
    """Have the next epoch begin at its first batch, if the last one was finished.

    Lightning 2.6.6 (loops/training_epoch_loop.py:reset) resumes a run of ``max_steps`` that ended, or was saved, at an
    epoch's end with one stray batch of the finished epoch, and begins the next epoch's order anew after it.
    """
    fit_loop = lightning_state["loops"]["fit_loop"]
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if epochs["total"]["processed"] == epochs["total"]["ready"] and batches["is_last_batch"]:
        for counts in epochs.values():  # of one that was saved in on_train_epoch_end
            counts["completed"] = counts["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
