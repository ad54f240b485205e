"""``EMA``: an exponential moving average of the weights, with which a run is evaluated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_megatron.callbacks.spike_guard import SpikeGuard
from lightning_megatron.engine.weight_average import WeightAverage
from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.foreign_names import checks_options


@checks_options
class EMA(Callback):
    """Keeps an exponential moving average of the trained weights, and evaluates with it.

    The first update copies the weights; each later one is ``average = decay * average + (1 - decay) * weights``, in
    fp32 on the master weights, as ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)`` does for
    a whole model. Frozen weights stay as they are: with LoRA only the adapters are averaged. So do buffers, such as the
    biases of experts, which torch does not average either. A step that was skipped (``on_nan="skip"``, an overflow of
    ``16-mixed``) updates nothing.

    The average is in place of the weights while Lightning validates, tests or predicts, in all hooks from this
    callback's ``on_validation_start`` to the last ``on_validation_end``, and in ``with ema.average_parameters():``. The
    weights then come back bit for bit, after an error, too. Before the first update the weights themselves are used.

    Each rank keeps 4 bytes for each parameter whose optimizer state it holds, and during an evaluation also a copy of
    its weights (2 bytes a parameter with ``bf16-mixed``, 4 with ``32-true``). Checkpoints, also those with
    ``save_weights_only=True``, hold the weights and the average, whenever they are saved. They resume at any layout.
    Give it before callbacks of your own that save or evaluate in ``on_train_batch_end``, where it updates the average;
    ``ModelCheckpoint`` comes last in any case.
    """

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        start_step: int = 0,
        device: str | None = None,
    ) -> None:
        """Set the average.

        Args:
            decay: Share of the average that an update keeps, from 0 to 1.
            every_n_steps: Optimizer steps between two updates.
            start_step: First step (``trainer.global_step``) that may update.
            device: ``cpu`` keeps the average in host memory, at the cost of a copy of the weights to it in each update;
                None: on the device of the weights.

        Raises:
            ConfigError: If a value is out of range.
        """
        require_number("decay", decay, at_most=1)
        require_number("every_n_steps", every_n_steps, at_least=1)
        require_number("start_step", start_step)
        if device not in (None, "cpu"):
            raise ConfigError(
                f"device={device!r}: expected cpu, or none for the device of the weights; correct device"
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.device = device
        self._strategy: Any = None

    @property
    def num_updates(self) -> int:
        """Updates of the average so far, those before a resume included; 0 before the first."""
        average = self._average
        return 0 if average is None else average.num_updates

    @property
    def _average(self) -> WeightAverage | None:
        average: WeightAverage | None = getattr(self._strategy, "weight_average", None)
        return average

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the Trainer's other parts.

        Raises:
            ConfigError: If the strategy is not Megatron's, there are two such callbacks, a ``SpikeGuard`` comes before
                this one, or training begins within ``average_parameters``.
        """
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "average_weights"):
            raise ConfigError(
                "EMA: expected MegatronStrategy, whose weights it averages, got "
                f"{type(strategy).__name__}; use Lightning's EMAWeightAveraging"
            )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        if sum(isinstance(each, EMA) for each in callbacks) > 1:
            raise ConfigError(
                "EMA: expected one of these callbacks, got several; remove the others"
            )
        for each in callbacks[: callbacks.index(self)]:
            if isinstance(each, SpikeGuard):
                # The step that it has just rolled back would still be averaged.
                raise ConfigError(
                    "EMA: expected it before SpikeGuard in callbacks, got it behind; change the order"
                )
        average = self._average
        if stage == "fit" and average is not None and average.is_swapped_in:
            raise ConfigError(
                "fit: expected the trained weights, got their average; call it after the block of average_parameters"
            )
        self._strategy = strategy

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate the average, before a checkpoint is loaded."""
        device = None if self.device is None else torch.device(self.device)
        self._strategy.average_weights(device)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Update the average if it is due; does not communicate."""
        step = trainer.global_step
        if step < self.start_step or step % self.every_n_steps:
            return
        average = self._average
        assert average is not None, "on_fit_start has allocated it"
        optimizer = self._strategy.megatron_optimizer
        if not optimizer.has_skipped:
            optimizer.weight_changes.take_over()  # of callbacks before this one
            average.update(self.decay)

    # ---- evaluation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in place of the weights; the strategy's ``on_validation_end`` undoes it."""
        self._begin_evaluation(trainer)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See ``on_validation_start``."""
        self._begin_evaluation(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See ``on_validation_start``."""
        self._begin_evaluation(trainer)

    def _begin_evaluation(self, trainer: Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        start = self._strategy.checkpointing.start_checkpoint
        if fitting or (start is None and self.num_updates):
            self._strategy.swap_average_in()
        elif start is None:
            rank_zero_warn(
                "EMA: expected an average of the weights, got none in this process; the weights are used as they are. "
                "Give ckpt_path, or remove the callback"
            )
        elif not self._strategy.checkpointing.load_average():
            rank_zero_warn(
                f"EMA: checkpoint {start} has no average of the weights, so the weights themselves are used; give one "
                "of a run with EMA, or remove the callback"
            )

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """The average in place of the weights within the block, for ``generate`` or ``save_pretrained``.

        Every rank must enter, during or after ``fit``.

        Raises:
            ConfigError: If there is no average yet.
        """
        average = self._average
        if average is None or not average.num_updates:
            raise ConfigError(
                "average_parameters: expected an update of the average before, got none; train first, with this "
                "callback"
            )
        self._strategy.swap_average_in()
        try:
            yield
        finally:
            average.swap_out()

    @override
    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,
    ) -> None:
        """Bring the weights back, on this rank alone if need be."""
        if self._average is not None:
            self._average.restore()
