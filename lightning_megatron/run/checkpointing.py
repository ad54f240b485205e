"""Checkpoint hooks of the strategy: Megatron's shards beside Lightning's dict, resuming, and saving on preemption.

Lightning ends a run on SIGTERM with code 0 and without a checkpoint (2.6.6: ``SIGTERMException`` is a ``SystemExit``).
Here the run saves a checkpoint that ``ckpt_path="last"`` finds, and exits with code 143.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint import find
from lightning_megatron.checkpoint.host_buffer import HostBuffer
from lightning_megatron.checkpoint.load import LoadFrom, load_average, resume
from lightning_megatron.checkpoint.save import Save, preallocate
from lightning_megatron.checkpoint.schema import check_lightning_state
from lightning_megatron.checkpoint.state import RunState
from lightning_megatron.convert.foreign_weights import (
    check_initial_weights,
    load_weights_of_any_program,
)
from lightning_megatron.data.resumable import ResumableLoader
from lightning_megatron.data.stateful import StatefulLoader
from lightning_megatron.engine.collectives import raise_on_all_ranks, wait_for_all_ranks
from lightning_megatron.engine.progress import progress
from lightning_megatron.engine.weight_average import WeightAverage
from lightning_megatron.errors import (
    TERMINATED,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    NumericsError,
    as_options,
)
from lightning_megatron.run.lightning_state import (
    check_data_position,
    close_finished_epoch,
    forget_addresses,
    loader_state,
    without_training_state,
)
from lightning_megatron.run.nonfinite import WeightOrigin
from lightning_megatron.run.signals import DeferredSignals
from lightning_megatron.run.start import (
    find_checkpoint,
    is_of_this_job,
    paths_of_last,
    preemption_path,
    requeued_checkpoints,
    savers_of,
)
from lightning_megatron.storage.failures import (
    failures_as_errors,
    is_caused_by_files,
    store_failures_as_errors,
)
from lightning_megatron.storage.paths import as_path, is_remote
from lightning_megatron.storage.publish import remove, wait_for_deletions

if TYPE_CHECKING:
    import lightning.pytorch as pl


T = TypeVar("T")

_FAILURE_WAIT = timedelta(seconds=30)
"""How long a failed rank waits for all other ranks to fail, too, before a callback may save."""

modules_with_weights: WeakKeyDictionary[torch.nn.Module, WeightOrigin | None] = WeakKeyDictionary()
"""Modules of this process that were trained or have loaded a checkpoint: a later run keeps their weights.

With the origin of the weights; None if they may have been trained since."""


class _Strategy(Protocol):
    """What checkpointing needs of ``MegatronStrategy``."""

    load_weights_only: bool
    optimizers: list[torch.optim.Optimizer]

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...

    def broadcast(self, obj: T) -> T: ...

    def engine(self) -> AbstractContextManager[None]: ...


class Checkpointing:
    """Checkpoints of a strategy's runs: which one a run starts from, what it saves, and when it must save.

    Only one save is in progress at a time. Checkpoints that Lightning asks to remove stay until the one that replaces
    them is complete. If a save fails, older checkpoints stay, and the next save is tried as usual.
    """

    def __init__(
        self,
        strategy: _Strategy,
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
        self._load_from: LoadFrom | None = None
        if load_from is not None:
            self._load_from = as_options(LoadFrom, load_from, "load_from")
        self.is_asynchronous = async_save
        """Whether training goes on while files are written from a copy in host memory."""
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
        self._buffer = HostBuffer(in_place=not async_save)
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
        self._training_ended = False
        self._first_step = None
        self._failure = None
        self._failed_lookup = None
        self._removals = []
        self._steps = {}
        self._undo.close()

    def end(self) -> None:
        """Abandon a save in progress, and release the host memory of saves. Does not communicate."""
        self._abandon()
        self._undo.close()
        wait_for_deletions()
        self._buffer.release()

    def take_loader_state(self) -> dict[str, Any] | None:
        """Pop the position in the training data to resume from; None to start from the beginning."""
        state = self._loader_state
        self._loader_state = None
        return state

    # ---- saving -----------------------------------------------------------------------------------------------------

    @progress.saving()
    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
    ) -> None:
        """Save the run and Lightning's dict, after a save that is still in progress; every rank must call.

        Raises:
            CheckpointError: If the dict holds more than plain data; if this is the run's last save, and it fails.
        """
        start = time.monotonic()
        self._reraise_unless_all_ranks_failed(filepath)
        state = self._trainer.state
        is_fitting = state.fn == TrainerFn.FITTING
        is_training = is_fitting and state.status == TrainerStatus.RUNNING
        # If it fails, no later step of this run would save again.
        is_final = not is_training or self._signals.is_delivering or self._training_ended
        is_validating = is_fitting and self._trainer.validating
        _mark_validation(checkpoint, is_interrupted=is_final and is_validating)
        self.finish()
        run = self._run
        if self._position is not None:
            self._position = replace(self._position, save=self._position.save + 1)
            run = replace(run, position=asdict(self._position))
        with self._trained_weights():
            saving = Save(run, checkpoint, self._strategy.broadcast(str(filepath)))
            self._removals = [path for path in self._removals if path != saving.path]
            with self._failure_as_warning(is_final):
                self._raise_failed_lookup(saving.path)
                saving.start(self._buffer)
                self.saving = saving
                if "optimizer_states" in checkpoint:
                    self._steps[saving.path] = checkpoint["global_step"]
            if is_final or not self.is_asynchronous:
                self.finish(is_final=is_final)
        if is_final:
            self.end()
        progress.saved(time.monotonic() - start)

    @contextlib.contextmanager
    def _trained_weights(self) -> Iterator[None]:
        """The trained weights within the block, also while their average is in their place."""
        average = self._run.average
        if average is None or not average.is_swapped_in:
            yield
            return
        average.write_trained()
        yield  # after an error the trained weights stay: the other ranks may not be here
        with self._strategy.engine():
            average.write_average()

    @progress.saving()
    def finish(self, *, is_final: bool = False) -> None:
        """Complete the save in progress, if there is one; waits for the files of all ranks.

        Args:
            is_final: Whether the run ends here.

        Raises:
            CheckpointError: If the run ends here, and its last save fails or has failed before.
        """
        saving = self.saving
        self.saving = None
        if saving is None:
            if is_final and self._failure is not None:
                raise self._failure
            return
        with self._failure_as_warning(is_final):
            saving.finish()
            if self.is_asynchronous:
                rank_zero_info(saving.report())
            self._failure = None
            self._written.add(saving.path)
            self._remove_replaced()

    def _tolerate_failed_lookups(self, saver: ModelCheckpoint) -> None:
        """Let a save fail, instead of the run, if ``saver`` cannot find out whether its checkpoint's name is taken.

        Lightning asks before each save, on rank 0 alone, while the other ranks wait for the answer. No hook lies
        between the two (2.6.6, callbacks/model_checkpoint.py:file_exists), so the run replaces the method.
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
        error = self._failed_lookup
        self._failed_lookup = None
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
        saving = self.saving
        self.saving = None
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
        removals = self._removals
        self._removals = []
        if not self._strategy.is_global_zero:
            return
        folders = self._checkpoint_folders
        for path in removals:
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
        polled_save = self._polled_save
        self._polled_save = self.saving
        all_written = self._signals.deliver(is_written)
        if all_written and polled_save is not None and polled_save is self.saving:
            self.finish()

    def on_train_start(self) -> None:
        """Record the first step, warn of callbacks that would not save, and preallocate memory for async saves."""
        trainer = self._trainer
        self._first_step = trainer.global_step
        num_val_batches = trainer.num_val_batches
        if not isinstance(num_val_batches, list):
            num_val_batches = [num_val_batches]
        savers = savers_of(trainer)
        for saver in savers:
            self._tolerate_failed_lookups(saver)
            monitor = saver.monitor or ""
            if monitor.startswith("val_") and not sum(num_val_batches):
                # Lightning would silently save nothing.
                rank_zero_warn(
                    f"ModelCheckpoint(monitor={monitor!r}): expected validation, got a run without; it saves nothing, "
                    "or with save_last at the end only; leave monitor out and set every_n_train_steps"
                )
        names = {(saver.dirpath, saver.filename) for saver in savers}
        if self.is_asynchronous and len(names) < len(savers):
            # Lightning picks another name only if it finds the first one's file.
            self.is_asynchronous = False
            rank_zero_warn(
                "async_save=True: expected a filename or dirpath of its own for each ModelCheckpoint, got the same for "
                "two, which would overwrite each other's checkpoints; training waits for saves until each has one"
            )
        if self.is_asynchronous and savers and not getattr(trainer, "fast_dev_run", False):
            run = self._run
            if all(saver.save_weights_only for saver in savers):
                run = run.weights_only()
            preallocate(run, self._buffer)

    def on_train_end(self) -> None:
        """Complete the last save.

        Raises:
            CheckpointError: If it fails, or an earlier save has failed and none was attempted since.
        """
        self._run.settle()
        self._training_ended = True
        self._first_step = None
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
        saved = "with nothing to save"
        if self._first_step not in (None, trainer.global_step):
            path = preemption_path(trainer)
            if path is not None:
                trainer.save_checkpoint(path)
                saved = f"its checkpoint is {path}, resume with ckpt_path='last'"
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
            ConfigError: If ``load_weights_only`` has no checkpoint whose weights it would load.
        """
        folders = []
        if trainer.state.fn in (None, TrainerFn.FITTING):
            for callback in trainer.checkpoint_callbacks:
                folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
                folders.append(as_path(folder))
        # Before Lightning's callbacks look there. Ranks that have been started already list these directories at this
        # moment, so nothing is written before they can wait for each other, in setup.
        find.check_reachable(each for each in folders if is_remote(each))
        with store_failures_as_errors("the checkpoint to start from cannot be looked up"):
            found = find_checkpoint(trainer, ckpt_path)
        self._start_checkpoint = None
        has_checkpoint = found not in (None, "last")  # "last": there is none
        if has_checkpoint:
            self._start_checkpoint = str(found)
        has_weights = self._strategy.lightning_module in modules_with_weights
        begins_anew = found is None and ckpt_path is None and not has_weights
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._strategy.load_weights_only and is_fitting and begins_anew:
            raise ConfigError(
                "load_weights_only=True: expected ckpt_path, whose weights a new run begins with, got none; give "
                "ckpt_path (or load_from in place of both), or leave it out"
            )
        if self.initial_weights is not None and not has_checkpoint and not has_weights:
            check_initial_weights(self.initial_weights)
        return found

    def setup(self, run: RunState, *, fitting: bool) -> None:
        """Set the live objects of a run, and load ``load_from`` if the model has only its initial weights.

        Every rank must call, inside the engine.

        Raises:
            CheckpointError: If loading fails, the ranks have found different checkpoints to start from, or the run
                could not save its own.
        """
        self._run = run
        module = self._trainer.lightning_module
        rank_0_checkpoint = self._strategy.broadcast(self._start_checkpoint)
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
        if self._start_checkpoint is None and module in modules_with_weights:
            self.weight_origin = modules_with_weights[module]
        else:
            checkpoint = None
            if self._start_checkpoint is not None:
                checkpoint = as_path(self._start_checkpoint)
            elif source is not None:
                target = run if fitting else replace(run, optimizer=None)
                is_own = getattr(module, "model_provider", None) is not None
                model = None if is_own else getattr(module, "model_config", None)
                checkpoint = load_weights_of_any_program(target, model, source)
            adaptation = getattr(module, "adaptation", None)
            self.weight_origin = WeightOrigin(
                checkpoint=checkpoint,
                model=getattr(module, "pretrained_path", None),
                adapter=getattr(adaptation, "source", None),
            )
        if fitting and self._strategy.is_global_zero:
            self._position = self._first_position()
        if fitting or source is not None:
            # After this run, training may have changed them.
            modules_with_weights[module] = None if fitting else self.weight_origin

    def keep_average(self, average: WeightAverage) -> None:
        """Save and resume the average of the weights with this run."""
        self._run = replace(self._run, average=average)

    @property
    def start_checkpoint(self) -> str | None:
        """The checkpoint that the Trainer loads in this run; None if it loads none."""
        return self._start_checkpoint

    @property
    def weights_alone_of(self) -> str | None:
        """The checkpoint of whose weights ``load_weights_only`` makes a new run; None if a run begins otherwise."""
        start = self._start_checkpoint
        if start is None or not self._strategy.load_weights_only or is_of_this_job(as_path(start)):
            return None
        return start

    @property
    def has_trained(self) -> bool:
        """Whether the module has been trained in this process; a run without a checkpoint goes on with its weights."""
        module = self._trainer.lightning_module
        return module in modules_with_weights and modules_with_weights[module] is None

    def load_average(self) -> bool:
        """Replace the weights of the checkpoint that this evaluation has loaded by their average.

        Every rank must call.

        Returns:
            Whether the checkpoint has an average; if not, the weights stay as they are.
        """
        assert self._start_checkpoint is not None, "there is a checkpoint"
        with torch.inference_mode(False), self._strategy.engine():
            return load_average(self._run, as_path(self._start_checkpoint))

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
        beside = dict.fromkeys(paths_of_last(self._trainer))
        beside |= dict.fromkeys(requeued_checkpoints(root))
        return find.continued(resumed, beside)

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
        # LearningRateFinder goes back to a checkpoint that this run has written.
        is_own = is_of_this_job(path) or path in self._steps
        resumes = fitting and (is_own or not self._strategy.load_weights_only)
        run = self._run
        if not resumes:
            run = replace(run, optimizer=None)
        modules_with_weights[trainer.lightning_module] = None if fitting else self.weight_origin
        self.finish()
        with self._strategy.engine():
            loaded = resume(run, path)
            check_lightning_state(loaded, path, trainer.fit_loop.state_dict(), resumes=resumes)
            if fitting and not resumes and self._run.optimizer is not None:
                self._run.optimizer.reload_masters()  # master weights
        forget_addresses(loaded, trusted=(path.parent, *self._checkpoint_folders))
        if not resumes:
            return without_training_state(loaded, datamodule) if fitting else loaded
        # Without max_epochs, a data module continues in its single long epoch.
        if loader_state(loaded) is not None or (trainer.max_epochs or -1) >= 0:
            close_finished_epoch(loaded)
        check_data_position(loaded, datamodule, path)
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
        position = loader_state(loaded)
        loader = trainer.train_dataloader
        if position is not None and isinstance(loader, (ResumableLoader, StatefulLoader)):
            # Created early, as for trainer.estimated_stepping_batches.
            loader.load_state_dict(position)
        else:
            self._loader_state = position
        return loaded

    def roll_back(
        self,
        *,
        before: int,
    ) -> dict[str, Any] | None:
        """Load this run's newest checkpoint from before a step, during training; every rank must call.

        Weights, optimizer, random states and learning rates are restored; samples and step count go on.

        Returns:
            Lightning's dict of the checkpoint; None if there is none.

        Raises:
            CheckpointError: If the checkpoint is damaged.
        """
        self._run.settle()
        self.finish()
        newest = None
        with raise_on_all_ranks(), failures_as_errors("an earlier checkpoint cannot be looked up"):
            # Only rank 0 looks at the files: Lightning may have removed some.
            if self._strategy.is_global_zero:
                newest = self._newest_complete(before)
        path = self._strategy.broadcast(newest)
        if path is None:
            return None
        with self._strategy.engine():
            loaded = resume(self._run, as_path(path))
        optimizer = self._run.optimizer
        if optimizer is not None:
            for state in loaded["optimizer_states"]:
                optimizer.restore_settings(state)
        configs = self._trainer.lr_scheduler_configs
        for config, state in zip(configs, loaded["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        return loaded

    def _newest_complete(self, before: int) -> str | None:
        for path in sorted(self._steps, key=self._steps.__getitem__, reverse=True):
            if self._steps[path] < before and find.is_complete(path):
                return str(path)
        return None


def _mark_validation(lightning_state: Mapping[str, Any], *, is_interrupted: bool) -> None:
    """Have a resumed run repeat the validation within which this run ends, and no other one.

    Lightning 2.6.6 (loops/evaluation_loop.py:update_restart_stage) goes back to a validation of which one batch more
    was started than processed. Any other it leaves out, with its metrics and what depends on them. It never corrects
    these counts, with which later checkpoints of the epoch would repeat theirs.

    Args:
        lightning_state: The dict that is about to be saved, changed in place.
        is_interrupted: Whether the run ends within a validation.
    """
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    progress = fit_loop.get("epoch_loop.val_loop.batch_progress")
    if progress is None:  # weights only
        return
    total = progress["total"]
    if is_interrupted:
        progress["is_last_batch"] = False
        progress["current"] = dict.fromkeys(progress["current"], 0)
        total |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    elif total["started"] - 1 == total["processed"] == total["completed"]:
        total["ready"] = total["processed"]
        total["started"] = total["processed"]
