"""What do Lightning's hooks for checkpoints do here? They save and load Megatron's shards beside Lightning's dict."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.checkpoint_io import (
    check_place_in_data,
    load_lightning_checkpoint,
    loader_state,
    only_weights,
)
from lightning_megatron.ckpt_path import check_local, check_writable, find_checkpoint, is_of_requeue
from lightning_megatron.data.loader import ResumableLoader
from lightning_megatron.engine import checkpoint
from lightning_megatron.engine.agreement import all_ranks_come, on_all_ranks_alike
from lightning_megatron.engine.checkpoint_partial import reload_masters
from lightning_megatron.engine.signals import DeferredSignals
from lightning_megatron.errors import CheckpointError, NonFiniteError
from lightning_megatron.load_from import LoadFrom, load_weights, modules_with_weights
from lightning_megatron.preemption import TERMINATED, last_of, refuge_of
from lightning_megatron.saves import Saves
from lightning_megatron.strategy_state import StrategyState, ready

if TYPE_CHECKING:
    import lightning.pytorch as pl


_PATIENCE = timedelta(seconds=30)
"""How long a rank that has failed waits for the others to fail, too, where a callback then saves."""


class Checkpointing(StrategyState):
    """The side of ``MegatronStrategy`` that Lightning calls to save, load and remove checkpoints."""

    load_weights_only: bool
    _saves: Saves
    _signals: DeferredSignals | None
    _is_delivering_signals: bool
    _load_from: LoadFrom | None
    _beginning: str | None
    """The checkpoint that the Trainer loads in this run."""
    _is_trained: bool
    _is_preempted: bool
    _first_step: int | None
    """``global_step`` when training began; None before."""
    _loader_state: dict[str, Any] | None
    """Where the training data goes on, until its loader is made."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    def _run_state(self, *, with_optimizer: bool) -> checkpoint.RunState:
        module = ready(self.lightning_module, "connect")
        return checkpoint.RunState(
            chunks=self._chunks,
            optimizer=self._megatron_optimizer if with_optimizer else None,
            rng=ready(ready(self._runtime, "setup_environment").rng, "setup_environment"),
            topology=self.topology,
            model_description=getattr(module, "model_description", {}),
            hugging_face_config=getattr(module, "hugging_face_config", None),
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whatever the module holds besides Megatron's chunks (metrics, extra heads): equal on all ranks."""
        state = ready(self.lightning_module, "connect").state_dict()
        return {name: value for name, value in state.items() if not name.startswith("model_chunks.")}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        ready(self.lightning_module, "connect").load_state_dict(checkpoint["state_dict"], strict=False)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What is not sharded; its presence in Lightning's dict says that the rest belongs into the checkpoint too."""
        return optimizer.state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: ``load_checkpoint`` has done it."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._end_unless_all_ranks_save(filepath)
        path = check_local(self.broadcast(str(filepath)))
        run = self._run_state(with_optimizer="optimizer_states" in checkpoint)
        with self.engine():
            self._saves.save(run, checkpoint, path, is_final=self._is_ending)

    def _end_unless_all_ranks_save(self, path: str | Path) -> None:
        """Go on with the failure that callbacks like ``OnExceptionCheckpoint`` save after, if it is not all ranks'.

        Otherwise this rank would wait for the others, and they for it, and nobody would hear of the failure.
        """
        failure = sys.exc_info()[1]
        is_after_failure = ready(self.lightning_module, "connect").trainer.state.status == TrainerStatus.INTERRUPTED
        if failure is None or not is_after_failure or isinstance(failure, SIGTERMException):
            return
        if not all_ranks_come(_PATIENCE):
            self._saves.abandon()
            reason = f"not all ranks have failed within {_PATIENCE.seconds} s, and one alone cannot save"
            warnings.warn(f"checkpoint {path} is not written: {reason}", stacklevel=2)
            raise failure

    @property
    def _is_ending(self) -> bool:
        """Whether no later step of this run would save again, should a save fail now."""
        state = ready(self.lightning_module, "connect").trainer.state
        is_training = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        return not is_training or self._is_delivering_signals or self._is_trained

    def _at_step_boundary(self) -> None:
        """What all ranks do together between two batches: act on signals, and complete a save that is written."""
        signals = ready(self._signals, "setup_environment")

        def agree(written: bool) -> bool:
            self._is_delivering_signals = True
            try:
                return signals.deliver(written)
            finally:
                self._is_delivering_signals = False

        if self._saves.is_written_everywhere(agree):
            with self.engine():
                self._saves.finish()

    @override
    def on_train_start(self) -> None:
        self._first_step = ready(self.lightning_module, "connect").trainer.global_step

    @override
    def on_train_end(self) -> None:
        """Complete the last save.

        Raises:
            CheckpointError: If it has failed, or an earlier one has and none after it has been tried.
        """
        self._is_trained, self._first_step = True, None
        with self.engine():
            self._saves.finish(is_final=True)
        self._saves.raise_failure()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # These are raised on all ranks at the same place. After any other one, also of ours (one rank alone may have
        # read a bad sample), the ranks cannot be told to meet again.
        if not isinstance(exception, (SIGTERMException, NonFiniteError)):
            self._saves.abandon()
            return
        if self._saves.is_saving:
            with self.engine():
                self._saves.finish(is_final=True)
        if isinstance(exception, NonFiniteError):
            return
        self._save_before_exit()
        exception.code = TERMINATED
        self._is_preempted = True

    def _save_before_exit(self) -> None:
        """Save what was trained, unless the last checkpoint is of this very step; every rank must call."""
        trainer = ready(self.lightning_module, "connect").trainer
        news = f"SIGTERM at step {trainer.global_step}: the run ends with code {TERMINATED}"
        refuge = refuge_of(trainer) if self._first_step is not None else None
        if refuge is None or trainer.global_step == self._first_step:
            rank_zero_info(f"{news}, with nothing to save")
            return
        # Rank 0 looks alone: it is the one that removes what newer checkpoints have replaced, perhaps at this moment.
        is_saved = refuge.is_found_beside_others and self.broadcast(
            self.is_global_zero and self._saves.is_newest(last_of(trainer), trainer.global_step)
        )
        if not is_saved:
            trainer.save_checkpoint(refuge.path)
            on_all_ranks_alike(refuge.renew_link if self.is_global_zero else lambda: None)
        where = self._saves.newest if is_saved else refuge.path
        rank_zero_info(f"{news}; its checkpoint is {where}, go on with ckpt_path='last'")

    def begin_with(self, trainer: pl.Trainer, ckpt_path: str | Path | None) -> str | Path | None:
        """The checkpoint that a run begins with; called by the launcher before there are other processes.

        Args:
            trainer: About to run.
            ckpt_path: As the user gave it.

        Raises:
            CheckpointError: If a checkpoint is missing or not complete, or would be saved where there are no folders.
        """
        for callback in trainer.checkpoint_callbacks:
            check_local(getattr(callback, "dirpath", None) or trainer.default_root_dir)
        found = find_checkpoint(trainer, ckpt_path)
        self._beginning = None if found is None or found == "last" else str(found)  # "last" means that there is none
        is_new = self._beginning is None and self.lightning_module not in modules_with_weights
        if self._initial_weights is not None and is_new:
            self._initial_weights.found()
        return found

    def _load_new_runs_weights(self, *, fitting: bool) -> None:
        """Load what ``load_from`` says into a model that has only its initial weights; every rank must call.

        Raises:
            CheckpointError: If that fails, the ranks have not found the same checkpoint to resume from, or the run
                could not save its own.
        """
        on_all_ranks_alike(partial(_check_same, self._beginning, self.broadcast(self._beginning)))
        module = ready(self.lightning_module, "connect")
        if fitting and not getattr(module.trainer, "fast_dev_run", False):
            on_all_ranks_alike(partial(check_writable, self._checkpoint_folders))
        source = self._initial_weights
        if source is not None and self._beginning is None and module not in modules_with_weights:
            load_weights(self._run_state(with_optimizer=fitting), source)
        if fitting or source is not None:
            modules_with_weights.add(module)

    @property
    def _initial_weights(self) -> LoadFrom | None:
        """What a new run's weights come from: the option of this strategy, else the module's own checkpoint."""
        return self._load_from or getattr(self.lightning_module, "load_from", None)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        trainer = ready(self.lightning_module, "connect").trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        modules_with_weights.add(ready(self.lightning_module, "connect"))
        begins_anew = fitting and self.load_weights_only and not is_of_requeue(path)
        run = self._run_state(with_optimizer=fitting and not begins_anew)
        with self.engine():
            self._saves.finish()
            loaded = load_lightning_checkpoint(run, path)
            if begins_anew:
                reload_masters(ready(self._megatron_optimizer, "configure_optimizers"))
        if fitting and not begins_anew:
            check_place_in_data(loaded, getattr(trainer, "datamodule", None), path)
            if 0 <= trainer.max_steps <= loaded["global_step"]:
                left = f"max_steps={trainer.max_steps}: nothing is left to do; raise max_steps to train on"
                rank_zero_info(f"checkpoint {path} is of step {loaded['global_step']}, and {left}")
        if begins_anew:
            return only_weights(loaded, getattr(trainer, "datamodule", None))
        if fitting:
            for optimizer, state in zip(self.optimizers, loaded["optimizer_states"], strict=False):
                optimizer.load_state_dict(state)
            self._restore_loader(loader_state(loaded), trainer.train_dataloader)
        return loaded

    def _restore_loader(self, state: dict[str, Any] | None, loader: object) -> None:
        """Take the training data up; Lightning does so only in the middle of what it counts as an epoch."""
        if state is not None and isinstance(loader, ResumableLoader):
            loader.load_state_dict(state)  # someone asked for it already, as for trainer.estimated_stepping_batches
        else:
            self._loader_state = state

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._saves.remove(Path(filepath), self._checkpoint_folders)

    @property
    def _checkpoint_folders(self) -> list[Path]:
        """Where the Trainer's callbacks keep checkpoints, once they are set up."""
        callbacks = ready(self.lightning_module, "connect").trainer.checkpoint_callbacks
        folders = (getattr(callback, "dirpath", None) for callback in callbacks)
        return [Path(folder) for folder in folders if folder is not None]


def _check_same(mine: str | None, of_rank_0: str | None) -> None:
    if mine != of_rank_0:
        raise CheckpointError(
            f"this rank would begin with {mine or 'no checkpoint'} and rank 0 with {of_rank_0 or 'none'}; keep "
            "checkpoints on a file system that all nodes share"
        )
