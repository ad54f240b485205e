"""What do Lightning's hooks for checkpoints do here? They save and load Megatron's shards beside Lightning's dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.checkpoint_io import (
    load_lightning_checkpoint,
    loader_state,
    only_weights,
    save_lightning_checkpoint,
)
from lightning_megatron.data.serving.loaders import ResumableLoader
from lightning_megatron.engine import checkpoint
from lightning_megatron.strategy_state import StrategyState, ready


class Checkpointing(StrategyState):
    """The side of ``MegatronStrategy`` that Lightning calls to save, load and remove checkpoints."""

    load_weights_only: bool
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
        """Empty: its presence in Lightning's dict says that the sharded optimizer state belongs into the checkpoint."""
        return {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: ``load_checkpoint`` has done it."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(str(filepath)))
        run = self._run_state(with_optimizer="optimizer_states" in checkpoint)
        with self.engine():
            save_lightning_checkpoint(run, checkpoint, path)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        trainer = ready(self.lightning_module, "connect").trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        run = self._run_state(with_optimizer=fitting and not self.load_weights_only)
        with self.engine():
            loaded = load_lightning_checkpoint(run, path)
            if fitting and self.load_weights_only:
                for optimizer in self.optimizers:
                    optimizer.inner.reload_model_params()  # type: ignore[attr-defined]
        if fitting and self.load_weights_only:
            return only_weights(loaded, getattr(trainer, "datamodule", None))
        if fitting:
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
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))
