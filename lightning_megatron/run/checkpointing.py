"""Checkpoint hooks of the strategy: Megatron's shards beside Lightning's dict, resuming, and saving on preemption.

Lightning ends a run on SIGTERM with code 0 and without a checkpoint (2.6.6: ``SIGTERMException`` is a ``SystemExit``).
Here the run saves a checkpoint that ``ckpt_path="last"`` finds, and exits with code 143.

A signal handler interrupts the program anywhere, which on a Megatron rank is nearly always in the middle of some
communication. Lightning's handlers communicate themselves (trainer/connectors/signal_connector.py: SIGTERM broadcasts,
SLURM's requeue signal saves a checkpoint), so ranks that were interrupted at different points would deadlock. Here a
signal is only recorded; the registered handlers run between two batches, on all ranks at the same step.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import find
from lightning_megatron.checkpoint.host_memory import HostMemory
from lightning_megatron.checkpoint.load import LoadFrom, load_initial_weights, resume
from lightning_megatron.checkpoint.save import Save, preallocate
from lightning_megatron.checkpoint.schema import check_lightning_state
from lightning_megatron.checkpoint.state import RunState
from lightning_megatron.data.resumable import ResumableLoader
from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.engine.collectives import raise_on_all_ranks, wait_for_all_ranks
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import (
    TERMINATED,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    NumericsError,
    as_options,
)
from lightning_megatron.run.nonfinite import WeightOrigin
from lightning_megatron.run.restarts import FIRST_START, is_of_this_run
from lightning_megatron.storage.failures import (
    failures_as_errors,
    is_caused_by_files,
    store_failures_as_errors,
)
from lightning_megatron.storage.paths import as_path, is_remote
from lightning_megatron.storage.publish import remove, wait_for_deletions

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.strategy import MegatronStrategy


_FAILURE_WAIT = timedelta(seconds=30)
"""How long a failed rank waits for all other ranks to fail, too, before a callback may save."""

LAST = ModelCheckpoint.CHECKPOINT_NAME_LAST + ModelCheckpoint.FILE_EXTENSION
_PREEMPTED = "preempted.ckpt"
"""Name of the checkpoint saved on preemption where ``last.ckpt`` is a link."""
_REQUEUED = "hpc_ckpt_*.ckpt*"
"""Names of checkpoints that Lightning saves on SLURM's requeue signal (2.6.6, connectors/checkpoint_connector.py)."""

modules_with_weights: WeakKeyDictionary[torch.nn.Module, WeightOrigin | None] = WeakKeyDictionary()
"""Modules of this process that were trained or have loaded a checkpoint: a later run keeps their weights.

With the origin of the weights; None if they may have been trained since."""


class Checkpointing:
    """Checkpoints of a strategy's runs: which one a run starts from, what it saves, and when it must save.

    Only one save is in progress at a time. Checkpoints that Lightning asks to remove stay until the one that replaces
    them is complete. If a save fails, older checkpoints stay, and the next save is tried as usual.
    """

    def __init__(
        self,
        strategy: MegatronStrategy,
        *,
        load_from: LoadFrom | str | Path | None,
        async_save: bool,
    ) -> None:
        """Create the checkpointing of a strategy, before any run.

        Args:
            strategy: The strategy whose hooks call this object.
            load_from: As ``MegatronStrategy``.
            async_save: As ``MegatronStrategy``.
        """
        self._strategy = strategy
        if isinstance(load_from, (str, Path)):
            load_from = LoadFrom(path=str(load_from))
        self._load_from = (
            None if load_from is None else as_options(LoadFrom, load_from, "load_from")
        )
        self._asynchronous = async_save
        self.is_preempted = False
        self._start_checkpoint: str | None = None
        """The checkpoint that the Trainer loads in this run."""
        self.weight_origin: WeightOrigin | None = None
        """Where the weights are from that this run began with; None for those of an earlier run of the module."""
        self._trainer: pl.Trainer
        self._run: RunState
        self._signals: DeferredSignals
        self._training_ended: bool
        self._first_step: int | None
        """``global_step`` at the start of training; None outside of training."""
        self._loader_state: dict[str, Any] | None = None
        """Position in the training data to resume from, until the loader is created."""
        self._memory = HostMemory(in_place=not async_save)
        self.saving: Save | None = None
        """The save in progress."""
        self._polled_save: Save | None = None
        """The save in progress at the previous step boundary, whose state the ranks exchanged there."""
        self._failure: ConfigError | None = None
        """Error of the last save; None if it succeeded."""
        self._failed_lookup: Exception | None = None
        """Why Lightning could not find out on this rank whether the next checkpoint's name is taken."""
        self._undo = contextlib.ExitStack()
        """Undoes changes of the Trainer's callbacks when the run ends."""
        self._removals: list[Path] = []
        """Checkpoints that Lightning has asked to remove."""
        self._position: find.RunPosition | None = None
        """Place of the last save among those of the run, on rank 0, which writes it; None on other ranks."""
        self._written: set[Path] = set()
        self._steps: dict[Path, int] = {}
        """Steps of this run's checkpoints with optimizer state, including the one that it resumed from."""

    def begin(
        self, trainer: pl.Trainer, environment: ClusterEnvironment, group: dist.ProcessGroup
    ) -> None:
        """Reset for a new run; checkpoints of the previous run stay. Every rank must call.

        Args:
            trainer: Trainer of the new run.
            environment: Determines which signals are handled between two steps.
            group: Process group of all ranks over gloo.
        """
        self._trainer = trainer
        self._signals = DeferredSignals(environment, group)
        self._training_ended, self._first_step = False, None
        self._failure, self._removals, self._steps = None, [], {}
        self._failed_lookup = None
        self._undo.close()

    def end(self) -> None:
        """Abandon a save in progress, and release the host memory of saves. Does not communicate."""
        self._abandon()
        self._undo.close()
        wait_for_deletions()
        self._memory.release()

    def take_loader_state(self) -> dict[str, Any] | None:
        """Pop the position in the training data to resume from; None to start from the beginning."""
        state, self._loader_state = self._loader_state, None
        return state

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        """Save the run and Lightning's dict, after a save that is still in progress; every rank must call.

        Raises:
            CheckpointError: If the dict holds more than plain data; if this is the run's last save, and it fails.
        """
        start = time.monotonic()
        self._reraise_unless_all_ranks_failed(filepath)
        state = self._trainer.state
        is_training = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        # If it fails, no later step of this run would save again.
        is_final = not is_training or self._signals.is_delivering or self._training_ended
        self.finish()
        run = self._run
        if self._position is not None:
            self._position = replace(self._position, save=self._position.save + 1)
            run = replace(run, position=asdict(self._position))
        saving = Save(run, checkpoint, self._strategy.broadcast(str(filepath)))
        self._removals = [path for path in self._removals if path != saving.path]
        with self._failure_as_warning(is_final):
            self._raise_failed_lookup(saving.path)
            saving.start(self._memory)
            self.saving = saving
            if "optimizer_states" in checkpoint:
                self._steps[saving.path] = checkpoint["global_step"]
        if is_final or not self._asynchronous:
            self.finish(is_final=is_final)
        if is_final:
            self.end()
        progress.saves.append(time.monotonic() - start)

    def finish(self, *, is_final: bool = False) -> None:
        """Complete the save in progress, if there is one; waits for the files of all ranks.

        Args:
            is_final: Whether the run ends here.

        Raises:
            CheckpointError: If the run ends here, and its last save fails or has failed before.
        """
        saving, self.saving = self.saving, None
        if saving is None:
            if is_final and self._failure is not None:
                raise self._failure
            return
        with self._failure_as_warning(is_final):
            saving.finish()
            if self._asynchronous:
                rank_zero_info(saving.report())
            self._failure = None
            self._written.add(saving.path)
            self._remove_replaced()

    def _tolerate_failed_lookups(self, saver: ModelCheckpoint) -> None:
        """Let a save fail, instead of the run, if ``saver`` cannot find out whether its checkpoint's name is taken.

        Lightning asks before each save, on rank 0 alone, while the other ranks wait for the answer.
        """
        file_exists = saver.file_exists

        def exists(filepath: str | Path, trainer: pl.Trainer) -> bool:
            try:
                return file_exists(filepath, trainer)
            except Exception as error:
                if not is_caused_by_files(error):
                    raise
                self._failed_lookup = error
                return trainer.strategy.reduce_boolean_decision(False, all=False)

        # On the instance: a subclass may have a method of its own.
        saver.file_exists = exists  # type: ignore[method-assign]
        self._undo.callback(delattr, saver, "file_exists")

    def _raise_failed_lookup(self, path: Path) -> None:
        """Raise on all ranks if it is unknown whether ``path`` would replace another checkpoint.

        Raises:
            CheckpointError: With the reason.
        """
        error, self._failed_lookup = self._failed_lookup, None
        with raise_on_all_ranks(), failures_as_errors(f"checkpoint {path} is not written"):
            if error is not None:
                raise error

    @contextlib.contextmanager
    def _failure_as_warning(self, is_final: bool) -> Iterator[None]:
        """Turn the error of a save into a warning, unless it is the run's last save."""
        try:
            yield
        except ConfigError as error:
            if is_final:
                raise
            self._failure = error
            rank_zero_warn(
                f"{error}. The run goes on, older checkpoints stay, and the next save is tried as usual"
            )

    def _abandon(self) -> None:
        """Abandon the save in progress, which other ranks may never join to complete. Does not communicate."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.abandon()
            rank_zero_warn(
                f"checkpoint {saving.path} is not written: the run failed before all ranks had finished it"
            )

    def remove(self, path: Path) -> None:
        """Remove a checkpoint that a newer one replaces; later, if a save is in progress or the last one failed."""
        self._removals.append(path)
        if self.saving is None and self._failure is None:
            self._remove_replaced()

    def _remove_replaced(self) -> None:
        removals, self._removals = self._removals, []
        folders = self._checkpoint_folders
        for path in removals if self._strategy.is_global_zero else ():
            try:
                with failures_as_errors(f"checkpoint {path} could not be removed"):
                    self._remove_own(path, folders)
            except CheckpointError as error:
                rank_zero_warn(f"{error}; remove it by hand")

    def _remove_own(self, path: Path, folders: list[Path]) -> None:
        """Remove a checkpoint, unless a loaded state names a path that this run must not remove."""
        if path in self._written or find.is_checkpoint_within(path, folders):
            remove(path)
        elif path.is_symlink() or path.exists():
            where = " or ".join(map(str, folders))
            rank_zero_warn(
                f"{path} stays: it is no complete checkpoint within {where}; remove it by hand"
            )

    @property
    def _checkpoint_folders(self) -> list[Path]:
        """Directories in which the Trainer's callbacks keep checkpoints, once they are set up."""
        callbacks = self._trainer.checkpoint_callbacks
        folders = (getattr(callback, "dirpath", None) for callback in callbacks)
        return [as_path(folder) for folder in folders if folder is not None]

    def _reraise_unless_all_ranks_failed(self, path: str | Path) -> None:
        """Re-raise the error after which a callback like ``OnExceptionCheckpoint`` saves, unless all ranks failed.

        Otherwise this rank and the others would wait for each other, and the error would never be shown.
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
        """Handle signals, and complete a save whose files are written; all ranks call this between two batches."""
        is_written = self.saving is not None and self.saving.is_written()
        polled_save, self._polled_save = self._polled_save, self.saving
        all_written = self._signals.deliver(is_written)
        if all_written and polled_save is not None and polled_save is self.saving:
            self.finish()

    def on_train_start(self) -> None:
        """Record the first step, warn of callbacks that would not save, and preallocate memory for async saves."""
        trainer, batches = self._trainer, self._trainer.num_val_batches
        self._first_step = trainer.global_step
        savers = [
            each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)
        ]
        for saver in savers:
            self._tolerate_failed_lookups(saver)
        for monitor in (
            saver.monitor for saver in savers if (saver.monitor or "").startswith("val_")
        ):
            if not (
                sum(batches) if isinstance(batches, list) else batches
            ):  # Lightning then silently saves nothing
                rank_zero_warn(
                    f"ModelCheckpoint(monitor={monitor!r}): expected validation, got a run without; it saves nothing, "
                    "or with save_last at the end only; leave monitor out and set every_n_train_steps"
                )
        names = {(saver.dirpath, saver.filename) for saver in savers}
        if self._asynchronous and len(names) < len(savers):
            self._asynchronous = (
                False  # Lightning picks another name only if it finds the first one's file
            )
            rank_zero_warn(
                "async_save=True: expected a filename or dirpath of its own for each ModelCheckpoint, got the same for "
                "two, which would overwrite each other's checkpoints; training waits for saves until each has one"
            )
        if self._asynchronous and savers and not getattr(trainer, "fast_dev_run", False):
            with_optimizer = not all(saver.save_weights_only for saver in savers)
            preallocate(self._run if with_optimizer else self._run.weights_only(), self._memory)

    def on_train_end(self) -> None:
        """Complete the last save.

        Raises:
            CheckpointError: If it fails, or an earlier save has failed and none was attempted since.
        """
        self._run.settle()
        self._training_ended, self._first_step = True, None
        self.finish(is_final=True)

    def on_exception(self, exception: BaseException) -> None:
        """Save after SIGTERM, before the run exits; abandon a save in progress that other ranks may never join."""
        # These are raised on all ranks at the same point. After any other exception, also of this package (one rank
        # alone may have read a bad sample), the ranks may never meet in a collective again.
        if not isinstance(exception, (SIGTERMException, NonFiniteError, NumericsError)):
            self._abandon()
            return
        if self.saving is not None:
            self.finish(is_final=True)
        if not isinstance(exception, SIGTERMException):
            return
        trainer = self._trainer
        end = f"SIGTERM at step {trainer.global_step}: the run ends with code {TERMINATED}"
        path = None if self._first_step in (None, trainer.global_step) else preemption_path(trainer)
        if path is not None:
            trainer.save_checkpoint(path)
        saved = (
            "with nothing to save"
            if path is None
            else f"its checkpoint is {path}, resume with ckpt_path='last'"
        )
        rank_zero_info(f"{end}; {saved}")
        exception.code = TERMINATED
        self.is_preempted = True

    # ---- start of a run ---------------------------------------------------------------------------------------------

    def resolve_ckpt_path(
        self, trainer: pl.Trainer, ckpt_path: str | Path | None
    ) -> str | Path | None:
        """Find the checkpoint that a run starts from; the launcher calls this before it starts other processes.

        Args:
            trainer: The Trainer that is about to run.
            ckpt_path: The user's argument.

        Raises:
            CheckpointError: If the checkpoint is missing or not complete, or the object store for new ones refuses.
        """
        savers = (
            trainer.checkpoint_callbacks if trainer.state.fn in (None, TrainerFn.FITTING) else ()
        )
        folders = [
            as_path(getattr(callback, "dirpath", None) or trainer.default_root_dir)
            for callback in savers
        ]
        # Before Lightning's callbacks look there. Ranks that have been started already list these directories at this
        # moment, so nothing is written before they can wait for each other, in setup.
        find.check_reachable(each for each in folders if is_remote(each))
        with store_failures_as_errors("the checkpoint to start from cannot be looked up"):
            found = find_checkpoint(trainer, ckpt_path)
        self._start_checkpoint = (
            None if found is None or found == "last" else str(found)
        )  # "last": there is none
        is_new = (
            self._start_checkpoint is None
            and self._strategy.lightning_module not in modules_with_weights
        )
        if self.initial_weights is not None and is_new:
            self.initial_weights.resolve()
        return found

    def setup(self, run: RunState, *, fitting: bool) -> None:
        """Set the live objects of a run, and load ``load_from`` if the model has only its initial weights.

        Every rank must call, inside the engine.

        Raises:
            CheckpointError: If loading fails, the ranks have found different checkpoints to start from, or the run
                could not save its own.
        """
        self._run = run
        module, rank_0_checkpoint = (
            self._trainer.lightning_module,
            self._strategy.broadcast(self._start_checkpoint),
        )
        with raise_on_all_ranks():
            if self._start_checkpoint != rank_0_checkpoint:
                raise CheckpointError(
                    f"this rank would begin with {self._start_checkpoint or 'no checkpoint'} and rank 0 with "
                    f"{rank_0_checkpoint or 'none'}; keep checkpoints on a file system that all nodes share"
                )
            if fitting and not getattr(module.trainer, "fast_dev_run", False):
                # One rank of each host asks a store; a disk answers at once.
                asks_stores = self._strategy.local_rank == 0
                folders = self._checkpoint_folders
                find.check_writable(each for each in folders if asks_stores or not is_remote(each))
        source = self.initial_weights
        checkpoint = None if self._start_checkpoint is None else as_path(self._start_checkpoint)
        keeps_weights = checkpoint is None and module in modules_with_weights
        if source is not None and checkpoint is None and not keeps_weights:
            checkpoint = load_initial_weights(
                run if fitting else replace(run, optimizer=None), source
            )
        if keeps_weights:
            self.weight_origin = modules_with_weights[module]
        else:
            directory = getattr(module, "pretrained_path", None)
            adapter = getattr(getattr(module, "adaptation", None), "source", None)
            self.weight_origin = WeightOrigin(
                checkpoint=checkpoint, model=directory, adapter=adapter
            )
        if fitting and self._strategy.is_global_zero:
            self._position = self._first_position()
        if fitting or source is not None:
            # After this run, training may have changed them.
            modules_with_weights[module] = None if fitting else self.weight_origin

    def _first_position(self) -> find.RunPosition:
        """Position of a start that loads no checkpoint: a new line, or that of the training that it goes on with."""
        if self._position is not None and self._trainer.global_step > 0:
            return find.continued(self._position, beside=())
        return find.RunPosition.new()

    def _position_after(self, path: Path) -> find.RunPosition:
        """Position of a start that resumes from the checkpoint at ``path``."""
        resumed = find.find_newest(path).position
        if resumed is None:
            return find.RunPosition.new()
        root = as_path(self._trainer.default_root_dir)
        requeued = [each for each in find.list_checkpoints(root) if each.match(_REQUEUED)]
        return find.continued(
            resumed, beside=dict.fromkeys([*_paths_of_last(self._trainer), *requeued])
        )

    @property
    def initial_weights(self) -> LoadFrom | None:
        """Source of a new run's weights: the strategy's option ``load_from``, else the module's own checkpoint."""
        return self._load_from or getattr(self._strategy.lightning_module, "load_from", None)

    def load(self, checkpoint_path: str | Path) -> dict[str, Any]:
        """Load a checkpoint into the run, and return Lightning's dict; every rank must call."""
        path = as_path(self._strategy.broadcast(str(checkpoint_path)))
        trainer = self._trainer
        datamodule = getattr(trainer, "datamodule", None)
        fitting = trainer.state.fn == TrainerFn.FITTING
        resumes = fitting and (not self._strategy.load_weights_only or _is_of_this_job(path))
        run = self._run if resumes else replace(self._run, optimizer=None)
        modules_with_weights[trainer.lightning_module] = None if fitting else self.weight_origin
        self.finish()
        with self._strategy.engine():
            loaded = resume(run, path)
            check_lightning_state(loaded, path, trainer.fit_loop.state_dict(), resumes=resumes)
            if fitting and not resumes and self._run.optimizer is not None:
                self._run.optimizer.inner.reload_model_params()  # master weights
        _forget_addresses(loaded, trusted=(path.parent, *self._checkpoint_folders))
        if not resumes:
            return _without_training_state(loaded, datamodule) if fitting else loaded
        # Without max_epochs, a data module continues in its single long epoch.
        if _loader_state(loaded) is not None or (trainer.max_epochs or -1) >= 0:
            _close_finished_epoch(loaded)
        _check_data_position(loaded, datamodule, path)
        if 0 <= trainer.max_steps <= loaded["global_step"]:
            hint = (
                f"max_steps={trainer.max_steps}: nothing is left to do; raise max_steps to train on"
            )
            rank_zero_info(f"checkpoint {path} is of step {loaded['global_step']}, and {hint}")
        with (
            raise_on_all_ranks(),
            store_failures_as_errors("this run's earlier checkpoints cannot be looked up"),
        ):
            if self._strategy.is_global_zero:
                self._position = self._position_after(path)
        self._steps[path] = loaded["global_step"]
        for optimizer, state in zip(
            self._strategy.optimizers, loaded["optimizer_states"], strict=False
        ):
            optimizer.load_state_dict(state)
        # Lightning resumes the training data only in the middle of what it counts as an epoch.
        loader_state, loader = _loader_state(loaded), trainer.train_dataloader
        if loader_state is not None and isinstance(loader, ResumableLoader):
            loader.load_state_dict(
                loader_state
            )  # created early, as for trainer.estimated_stepping_batches
        else:
            self._loader_state = loader_state
        return loaded

    def roll_back(self, *, before: int) -> dict[str, Any] | None:
        """Load this run's newest checkpoint from before a step, during training; every rank must call.

        Weights, optimizer, random states and learning rates are restored; samples and step count go on.

        Returns:
            Lightning's dict of the checkpoint; None if there is none.

        Raises:
            CheckpointError: If the checkpoint is damaged.
        """
        self._run.settle()
        self.finish()
        newest_first = sorted(self._steps.items(), key=lambda entry: entry[1], reverse=True)
        # Only rank 0 looks at the files: Lightning may have removed some.
        found = (
            str(path) for path, step in newest_first if step < before and find.is_complete(path)
        )
        with raise_on_all_ranks(), failures_as_errors("an earlier checkpoint cannot be looked up"):
            newest = next(found, None) if self._strategy.is_global_zero else None
        path = self._strategy.broadcast(newest)
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
    """Records signals, and runs their handlers later, on all ranks at the same step."""

    def __init__(self, environment: ClusterEnvironment, group: dist.ProcessGroup) -> None:
        """Defer the signals for which Lightning registers communicating handlers, from the first ``deliver`` on.

        Args:
            environment: SLURM's adds its requeue signal.
            group: Process group of all ranks over gloo, which does not wait for a GPU.
        """
        self._signums: tuple[int, ...] = (signal.SIGTERM,)
        if (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal
        ):
            self._signums += (environment.requeue_signal,)
        self._group = group
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._received: set[int] = set()
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        """All-reduce of the previous ``deliver``, and its flags."""
        self.is_delivering = False
        """Whether handlers are running."""

    def deliver(self, done: bool = False) -> bool:
        """Run the handlers of signals that any rank had received at the previous call; every rank must call.

        The flags are reduced while the batch between two calls is computed, so nothing waits for them.

        Args:
            done: A flag that is reduced over all ranks along with the signals.

        Returns:
            Whether all ranks passed ``done`` at the previous call.
        """
        self._replace_handlers()
        any_not_done, *received = [True, *(False for _ in self._signums)]
        if self._pending is not None:
            work, flags = self._pending
            work.wait()
            any_not_done, *received = flags.tolist()
        flags = torch.tensor(
            [not done, *(signum in self._received for signum in self._signums)], dtype=torch.uint8
        )
        self._received.clear()
        self._pending = (
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True),
            flags,
        )
        self.is_delivering = True
        try:
            for signum, is_received in zip(self._signums, received, strict=True):
                if is_received and signum in self._handlers:
                    self._handlers[signum](signum, None)
        finally:
            self.is_delivering = False
        return not any_not_done

    def _replace_handlers(self) -> None:
        """Replace the handlers that Lightning has registered since; Lightning itself restores the original ones."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            handler = signal.getsignal(signum)
            if callable(handler) and handler != self._record:
                self._handlers[signum] = handler
                signal.signal(signum, self._record)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._received.add(signum)


# ---- finding the checkpoint to start from -------------------------------------------------------------------------


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
    if (
        fitting
        and FIRST_START in os.environ
        and (own := find_last(trainer)) is not None
        and is_of_this_run(own.time)
    ):
        return str(own.path)
    in_slurm = ckpt_path == "hpc" or SLURMEnvironment.detect()
    requeued = _find_requeued(as_path(trainer.default_root_dir)) if in_slurm else None
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
    found = (
        find_last(trainer)
        if is_last
        else find.find_newest(ckpt_path, to_resume=_needs_optimizer(trainer))
    )
    was_requeued = fitting and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if (
        requeued is not None
        and was_requeued
        and (not is_last or found is None or not _is_newer(found, requeued))
    ):
        rank_zero_info(
            f"this job was requeued: it resumes from {requeued.path}, not from ckpt_path={ckpt_path}"
        )
        return str(requeued.path)
    if found is not None:
        return str(found.path)
    if is_last and any(is_remote(path) for path in _paths_of_last(trainer)):
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
    paths = dict.fromkeys(_paths_of_last(trainer))
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


def _paths_of_last(trainer: pl.Trainer) -> list[Path]:
    """Where ``ckpt_path="last"`` looks: the checkpoints of all callbacks, and what a preempted run saves."""
    callbacks = trainer.checkpoint_callbacks
    savers = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
    paths = [as_path(trainer.default_root_dir) / LAST]  # saved on SIGTERM
    paths += [
        as_path(each.ckpt_path) for each in callbacks if isinstance(each, OnExceptionCheckpoint)
    ]
    for folder in (folder for saver in savers for folder in _saver_folders(saver, trainer)):
        paths += find.list_checkpoints(folder)
    return paths


def preemption_path(trainer: pl.Trainer) -> Path | None:
    """Path where a preempted run saves, and ``ckpt_path="last"`` looks; None for a Trainer that keeps no checkpoints.

    Every rank must call.
    """
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    # Lightning's debugging setup gives the Trainer the attribute, where no type checker sees it.
    if not savers or bool(getattr(trainer, "fast_dev_run", False)):
        return None
    saver = next((each for each in savers if each.save_last), savers[0])
    folder = as_path(str(saver.dirpath))
    log_dir = trainer.log_dir if trainer.loggers else None
    if log_dir is not None and folder.is_relative_to(as_path(log_dir).absolute()):
        # The log directory of this run alone, where the next run will not look.
        return as_path(trainer.default_root_dir).absolute() / LAST
    # Lightning removes the target of a replaced link at once, perhaps before its replacement is complete.
    last = (
        folder / _PREEMPTED
        if saver.save_last == "link"
        else as_path(saver.last_model_path or folder / LAST)
    )
    try:
        with failures_as_errors(f"{last} cannot be looked up"):
            is_own = find.is_checkpoint_within(last, [folder])
    except CheckpointError:  # this rank's store does not answer; rank 0 decides where to save
        is_own = False
    if not is_own:  # a loaded state may name any path
        last = folder / LAST
    saver.last_model_path = str(last)  # so that the resumed run replaces it
    return last


def _is_of_this_job(path: Path) -> bool:
    """Whether the checkpoint was saved on SLURM's requeue signal, or by an earlier start of a restarted run."""
    return path.match(_REQUEUED) or (
        FIRST_START in os.environ and is_of_this_run(find.find_newest(path).time)
    )


def _saver_folders(saver: ModelCheckpoint, trainer: pl.Trainer) -> list[Path]:
    """Directories in which ``saver`` keeps checkpoints, which it determines only in its ``setup``.

    Where a logger numbers its runs, those of all runs, since this run gets a new number.
    """
    if saver.dirpath is not None:
        return [as_path(saver.dirpath)]
    if not trainer.loggers:
        return [as_path(trainer.default_root_dir) / "checkpoints"]
    logger = trainer.loggers[0]
    runs, version = (
        as_path(logger.save_dir or trainer.default_root_dir) / str(logger.name),
        logger.version,
    )
    if isinstance(version, str) and not re.fullmatch(r"version_\d+", version):
        return [runs / version / "checkpoints"]
    return sorted(runs.glob("version_*/checkpoints"))


def _needs_optimizer(trainer: pl.Trainer) -> bool:
    """Whether the run loads the optimizer state of a checkpoint, too."""
    return trainer.state.fn == TrainerFn.FITTING and not getattr(
        trainer.strategy, "load_weights_only", False
    )


def _is_newer(one: find.CheckpointInfo, requeued: find.CheckpointInfo) -> bool:
    """Whether a checkpoint is newer than that of a requeued job: by the counters of their line, else by steps."""
    are_of_one_line = find.is_later(one, requeued) or find.is_later(requeued, one)
    return find.is_later(one, requeued) if are_of_one_line else one.step > requeued.step


def _find_requeued(root: Path) -> find.CheckpointInfo | None:
    found, _ = find.find_complete(
        each for each in find.list_checkpoints(root) if each.match(_REQUEUED)
    )
    if found:
        have_counters = all(each.position is not None for each in found)
        return find.last_saved(found) if have_counters else find.newest(found)
    if left := sorted(path.name for path in root.glob(_REQUEUED)):
        raise CheckpointError(
            f"{root} has no complete checkpoint of a requeued job, but {', '.join(left)}; remove it and give ckpt_path"
        )
    return None


# ---- Lightning's dict -----------------------------------------------------------------------------------------------

_TRAINING_STATE = ("loops", "callbacks", "lr_schedulers", "optimizer_states")


def _without_training_state(
    lightning_state: Mapping[str, Any], datamodule: object
) -> dict[str, Any]:
    """Lightning's dict as before a run: without steps, callbacks, schedules and position in the training data.

    Args:
        lightning_state: The dict of a checkpoint.
        datamodule: This run's data module, whose state in the dict is the position in the data; None if there is none.
    """
    dropped = (*_TRAINING_STATE, type(datamodule).__qualname__)
    fresh = {k: v for k, v in lightning_state.items() if k not in dropped}
    return {**fresh, "epoch": 0, "global_step": 0, "lr_schedulers": [], "optimizer_states": []}


def _forget_addresses(lightning_state: Mapping[str, Any], trusted: Iterable[Path]) -> None:
    """Remove addresses of object stores from the states of callbacks: they would be opened when Lightning uses them.

    Args:
        lightning_state: The dict of a checkpoint, changed in place.
        trusted: Directories whose files may be named: that of the checkpoint, and those of the run's callbacks.
    """
    folders = [str(folder).rstrip("/") for folder in trusted if is_remote(folder)]

    def is_foreign(value: object) -> bool:
        if not isinstance(value, str) or ("://" not in value and "::" not in value):
            return False
        is_within = any(value == folder or value.startswith(f"{folder}/") for folder in folders)
        return not is_within or "/.." in value

    callbacks = lightning_state.get("callbacks")
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if not isinstance(state, dict):
            continue
        foreign = [key for key, value in state.items() if is_foreign(value)]
        for key in foreign:
            rank_zero_warn(
                f"{key} of {name} in the checkpoint is {state[key]}, outside of the run's folders: forgotten"
            )
            state[key] = ""
        if isinstance(kept := state.get("best_k_models"), dict):
            state["best_k_models"] = {
                path: score for path, score in kept.items() if not is_foreign(path)
            }


def _loader_state(lightning_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """State of the training data's loader, if it was a single ``ResumableLoader``."""
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    states = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states[0] if len(states) == 1 and "random_state" in states[0] else None


def _check_data_position(lightning_state: dict[str, Any], datamodule: object, path: Path) -> None:
    """Check whether a checkpoint's position in the training data is of this run's kind of data; drop it otherwise.

    Raises:
        CheckpointError: If both have a data module, of different kinds.
    """
    expected = type(datamodule).__qualname__ if isinstance(datamodule, MegatronDataModule) else None
    states = {name: state for name, state in lightning_state.items() if isinstance(state, Mapping)}
    # A conversion writes the state of each of our data modules, without an order.
    saved = [name for name, state in states.items() if state.get("train_order") is not None]
    if expected in states or not (expected or saved):
        return
    if expected and saved:
        raise CheckpointError(
            f"data of checkpoint {path}: expected {expected}, got {' or '.join(saved)}; resume with the same kind, or "
            "begin a new run with the weights: MegatronStrategy(load_weights_only=True)"
        )
    lightning_state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop(
        "combined_loader", None
    )
    rank_zero_warn(
        f"{path} has no position in the data of {expected or 'this loader'}: the training data begins anew"
    )


def _close_finished_epoch(lightning_state: Mapping[str, Any]) -> None:
    """Make the next epoch start at its first batch, if the last one was finished.

    Lightning 2.6.6 (loops/training_epoch_loop.py:reset) resumes a run of ``max_steps`` that ended, or was saved, at the
    end of an epoch with one stray batch of the finished epoch, and restarts the next epoch's order after it.
    """
    fit_loop = lightning_state["loops"]["fit_loop"]
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if epochs["total"]["processed"] == epochs["total"]["ready"] and batches["is_last_batch"]:
        for counts in epochs.values():  # if it was saved in on_train_epoch_end
            counts["completed"] = counts["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
