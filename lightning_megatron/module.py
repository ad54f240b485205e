"""What does a user train? ``MegatronModule``: a Hugging Face model, an objective and an optimizer, without code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_megatron.convert.registry import HFConfigLike, config_fields, model_config
from lightning_megatron.engine.launch import seed_of_run, unchanged_environment
from lightning_megatron.engine.lr_schedule import LRSchedule, check_schedule
from lightning_megatron.engine.lr_scheduler import MegatronLRScheduler
from lightning_megatron.engine.optimizer import OptimizerOptions
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.steps.base import TrainStep
from lightning_megatron.steps.registry import train_step_named

if TYPE_CHECKING:
    from lightning_megatron.engine.schedule import StepOutput
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.models.transformer_config import EngineSettings
    from lightning_megatron.strategy import MegatronStrategy


class MegatronModule(pl.LightningModule):
    """Trains a Hugging Face architecture from random weights under ``MegatronStrategy``.

    Logs ``train_loss`` (and each of its terms as ``train_<term>``), ``val_loss``, ``test_loss``, ``lr`` and
    ``grad_norm``, with the same values on all ranks. Subclass it and override any of Lightning's hooks as usual.

    Args:
        model: A Hugging Face config object, a dict of one (with ``model_type``), a path to a ``config.json``, or a
            path to a model directory.
        train_step: The objective, by name or as an object of your own.
        lr: Peak learning rate.
        optimizer: Which optimizer, and its numbers.
        lr_schedule: How the learning rate and the weight decay move.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times tp.

    Raises:
        ConfigError: If the model is unknown, or a field of it cannot be honoured.
    """

    def __init__(  # noqa: D107 (described on the class)
        self,
        model: str | dict[str, Any] | Any,
        train_step: Literal["gpt"] | TrainStep = "gpt",
        lr: float = 3e-4,
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 (frozen)
        lr_schedule: LRSchedule = LRSchedule(),  # noqa: B008 (frozen)
        make_vocab_size_divisible_by: int = 128,
    ) -> None:
        super().__init__()
        self.model_config: ModelConfig = _described(model, make_vocab_size_divisible_by)
        self.train_step = train_step if isinstance(train_step, TrainStep) else train_step_named(train_step)
        self.lr = lr
        self.optimizer_options = optimizer
        self.lr_schedule = lr_schedule
        self.model_chunks: torch.nn.ModuleList | None = None
        self.built_for: EngineSettings | None = None
        self.save_hyperparameters({"model": config_fields(model), "lr": lr, "train_step": str(train_step)})

    @property
    def megatron(self) -> MegatronStrategy:
        """The strategy that runs this module.

        Raises:
            ConfigError: If it is another one.
        """
        from lightning_megatron.strategy import MegatronStrategy

        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigError(
                f"{type(self).__name__} runs on {type(strategy).__name__}; use Trainer(strategy=MegatronStrategy(...))"
            )
        return strategy

    @property
    def model_description(self) -> dict[str, Any]:
        """The model as plain data, by which a checkpoint is recognised."""
        return self.model_config.to_dict()

    def check(self, parallel: ParallelConfig) -> None:
        """Raise if this module cannot be trained on ``parallel``, before anything is built.

        Raises:
            ConfigError: If the model cannot be split so, or the schedule does not fit the Trainer.
        """
        parallel.check_model(self.model_config)
        if self.trainer.state.fn is None or self.trainer.state.fn.value == "fit":
            check_schedule(self.lr_schedule, self.lr, self.optimizer_options.weight_decay, self._total_steps)

    @property
    def _total_steps(self) -> int | None:
        """The Trainer's ``max_steps``; None if it counts epochs instead."""
        return None if self.trainer.max_steps in (None, -1) else self.trainer.max_steps

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build this rank's chunks; again if the layout or the precision is another than last time."""
        from lightning_megatron.models.gpt import build_gpt
        from lightning_megatron.models.initialization import initialize_weights
        from lightning_megatron.models.start_report import start_lines

        settings = self.megatron.settings
        if self.model_chunks is not None and self.built_for == settings:
            return
        with unchanged_environment():
            self.model_chunks = build_gpt(self.model_config, settings)
        initialize_weights(self.model_chunks, self.model_config, seed_of_run())
        self.built_for = settings
        for line in start_lines(self.model_config, settings):
            rank_zero_info(line)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One optimizer step's gradients; returns the loss, the same on every rank."""
        output = self.megatron.forward_backward(batch, self.train_step)
        self._log_losses("train", output, on_step=True)
        return output.loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """The loss of one batch; ``val_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("val", batch)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """The loss of one batch; ``test_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("test", batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Megatron's optimizer and the schedule, stepped after every optimizer step."""
        optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
        scheduler = MegatronLRScheduler(
            optimizer,
            lr=self.lr,
            weight_decay=self.optimizer_options.weight_decay,
            schedule=self.lr_schedule,
            total_steps=self._total_steps,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Lightning's, except that a step which an overflow skipped does not move the schedule."""
        report = self.megatron.optimizer_report
        if metric is None and report is not None and report.skipped:
            return
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what the optimizer did; the host has these numbers already, the same on every rank."""
        report = self.megatron.optimizer_report
        optimizer = self.optimizers()
        rates = [group["lr"] for group in optimizer.param_groups]  # type: ignore[union-attr]
        self.log("lr", _on_host(max(rates)), batch_size=1)
        if report is None:
            return
        if math.isfinite(report.grad_norm):
            self.log("grad_norm", _on_host(report.grad_norm), batch_size=1)
        if self.megatron.settings.dtypes.dynamic_loss_scale:
            self.log("loss_scale", report.loss_scale, batch_size=1)

    # ---- logging --------------------------------------------------------------------------------------------------

    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self.megatron.forward_only(batch, self.train_step)
        self._log_losses(stage, output, on_step=False)
        return output.loss

    def _log_losses(self, stage: str, output: StepOutput, *, on_step: bool) -> None:
        """Log the sum and each term; epoch means weigh every batch by its number of targets."""
        # Lightning weighs with a plain number; in training nothing is averaged, so none is read from the GPU.
        weight = 1 if on_step else int(output.num_targets[self.train_step.loss_terms[0]].item())
        # Lightning reads what is meant for a progress bar from the GPU at every step, bar or not.
        has_bar = self.trainer.progress_bar_callback is not None
        # The ranks agree already; to sync once an epoch only spares users Lightning's advice to do it.
        log = partial(self.log, on_step=on_step, on_epoch=not on_step, sync_dist=not on_step, batch_size=weight)
        log(f"{stage}_loss", output.loss, prog_bar=has_bar)
        for name, value in output.terms.items():
            log(f"{stage}_{name}", value)


def _on_host(number: float) -> torch.Tensor:
    """For ``self.log``: lightning 2.6, core/module.py, copies a plain number to the GPU and waits for all before it."""
    return torch.tensor(number)


def _described(model: HFConfigLike | Mapping[str, Any], make_vocab_size_divisible_by: int) -> ModelConfig:
    from dataclasses import replace

    if make_vocab_size_divisible_by < 1:
        raise ConfigError(
            f"make_vocab_size_divisible_by={make_vocab_size_divisible_by} must be at least 1; Megatron's default is 128"
        )
    return replace(model_config(model), make_vocab_size_divisible_by=make_vocab_size_divisible_by)
