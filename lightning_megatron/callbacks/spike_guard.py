"""``SpikeGuard``: rolls back and skips samples after a loss spike.

It does what PaLM's authors did by hand (https://arxiv.org/abs/2204.02311, section 5.1: restart from a checkpoint before
the spike and skip the batches around it, since a spike is caused by a batch *and* the current weights).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.errors import ConfigError, NumericsError, require_number
from lightning_megatron.foreign_names import checks_options

_DEVIATIONS_PER_MAD = 1.4826
"""Ratio of standard deviation to median absolute deviation (MAD) of a normal distribution."""
_SMALLEST_DEVIATION = 1e-3
"""Lower bound of a deviation relative to the median, for losses that are almost constant."""


@checks_options
class SpikeGuard(Callback):
    """Rolls back to the newest checkpoint from before a loss spike, and skips the samples since then.

    A spike is a loss more than ``threshold`` deviations above the median of the last ``window`` losses; a deviation is
    estimated from the median absolute deviation, which is robust to outliers. Weights, optimizer, random states and
    learning rates are restored from the newest checkpoint of this run from before the spike, and training continues
    with the next samples: bit for bit as a run that never had the skipped ones. Like steps skipped by
    ``on_nan="skip"``, the steps in between count towards ``max_steps``, but not for learning rates. A loss is checked
    after the next step has been queued, so that no step waits for the device; there is no check before ``window``
    losses. The state is saved in checkpoints, so that a resumed run behaves as an uninterrupted one.

    Logged: ``spike_rollbacks``, from the first rollback on.
    """

    def __init__(
        self,
        window: int = 100,
        threshold: float = 10.0,
        max_rollbacks: int = 3,
    ) -> None:
        """Set the spike detection.

        Args:
            window: Number of previous losses to compare a loss with.
            threshold: Deviations above their median beyond which a loss is a spike.
            max_rollbacks: Limit for the whole run, resumed parts included; the next spike raises an error.

        Raises:
            ConfigError: If a value is out of range.
        """
        require_number("window", window, at_least=2)
        require_number("threshold", threshold, at_least=1)
        require_number("max_rollbacks", max_rollbacks)
        self.window = window
        self.threshold = threshold
        self.max_rollbacks = max_rollbacks
        self.rollbacks = 0
        """Rollbacks so far."""
        self._losses: deque[float] = deque(maxlen=window)
        self._last: tuple[int, HostCopy] | None = None
        """Step and loss of the last step, which has not been checked yet."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without checkpoints to roll back to.

        Raises:
            ConfigError: If the strategy is not Megatron's, or all ``ModelCheckpoint`` callbacks save weights only.
        """
        if stage != "fit":
            return
        self._last = None
        if trainer.global_step == 0:
            self.rollbacks = 0
            self._losses.clear()
        if not hasattr(trainer.strategy, "checkpointing"):
            raise ConfigError(
                "SpikeGuard needs checkpoints of MegatronStrategy; use it, or remove the callback"
            )
        callbacks = trainer.checkpoint_callbacks
        savers = [each for each in callbacks if isinstance(each, ModelCheckpoint)]
        if all(saver.save_weights_only for saver in savers):
            raise ConfigError(
                "SpikeGuard has no checkpoint to roll back to; add ModelCheckpoint(every_n_train_steps=1000)"
            )

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        *_: Any,
    ) -> None:
        """Check the loss of the previous step; losses are equal on all ranks.

        Raises:
            NumericsError: On all ranks, for a spike after ``max_rollbacks`` rollbacks.
        """
        loss = outputs
        if isinstance(outputs, dict):
            loss = outputs["loss"]
        last = self._last
        self._last = (trainer.global_step, HostCopy(loss))
        if last is not None:
            step, copy = last
            self._check(trainer, step, copy.read())
        if self.rollbacks:
            pl_module.log(
                "spike_rollbacks",
                torch.tensor(float(self.rollbacks)),
                batch_size=1,
            )

    def _check(self, trainer: Trainer, step: int, loss: float) -> None:
        """Roll back if the loss of a step is a spike, else remember it."""
        if not math.isfinite(loss):  # the strategy's on_nan handles it
            return
        is_spike = len(self._losses) == self.window and loss > self._limit()
        if is_spike and self._roll_back(trainer, step, loss):
            return
        self._losses.append(loss)

    def _limit(self) -> float:
        median = statistics.median(self._losses)
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        deviation = max(_DEVIATIONS_PER_MAD * distance, _SMALLEST_DEVIATION * abs(median))
        return median + self.threshold * deviation

    def _roll_back(self, trainer: Trainer, step: int, loss: float) -> bool:
        """Load the newest checkpoint from before ``step``; False if there is none. Collective over the world."""
        spike = f"SpikeGuard: the loss of step {step} is {loss:.4g}, expected at most {self._limit():.4g}"
        if self.rollbacks >= self.max_rollbacks:
            raise NumericsError(
                f"{spike}, after max_rollbacks={self.max_rollbacks} rollbacks; look at samples and learning rate"
            )
        strategy: Any = trainer.strategy
        loaded = strategy.checkpointing.roll_back(before=step)
        if loaded is None:
            rank_zero_warn(
                f"{spike}; this run has no earlier checkpoint, so training continues without a rollback"
            )
            return False
        # A checkpoint saved without this callback has no losses.
        state: dict[str, Any] = {"losses": (), "last": None}
        state |= loaded["callbacks"].get(self.state_key, {})
        state["rollbacks"] = self.rollbacks + 1
        self.load_state_dict(state)
        first = loaded["global_step"] + 1
        rank_zero_warn(
            f"{spike}: weights, optimizer and learning rates are restored from step {first - 1}, and the samples of "
            f"steps {first} to {trainer.global_step} are skipped; rollback {self.rollbacks} of {self.max_rollbacks}"
        )
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        """Recent losses, that of the last step included, and the number of rollbacks."""
        last = None
        if self._last is not None:
            step, loss = self._last
            last = [step, loss.read()]
        return {
            "losses": list(self._losses),
            "last": last,
            "rollbacks": self.rollbacks,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``."""
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        self.rollbacks = state_dict["rollbacks"]
        self._last = None
        if state_dict["last"]:
            step, loss = state_dict["last"]
            self._last = (step, HostCopy(torch.tensor(loss, dtype=torch.float64)))
