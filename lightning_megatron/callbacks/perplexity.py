"""How much did training improve the validation perplexity?"""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class PerplexityReport(Callback):
    """Says at the end of ``fit`` what the validation perplexity was before and after; ``val_perplexity`` is in the log.

    "Before" is the validation that the Trainer runs before the first step; ``Trainer(num_sanity_val_steps=-1)`` makes
    it the whole validation set. A resumed run still knows it. The loss must be logged by ``validation_step``.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        """Set what to read.

        Args:
            monitor: Name of the logged validation loss, in nats per token.
        """
        self.monitor = monitor
        self._before: float | None = None
        self._before_is_partial = False
        self._after: float | None = None
        self._after_step = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget another run's figures; those of a resumed run are loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self._before, self._before_is_partial, self._after, self._after_step = None, False, None, 0

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss for the report."""
        loss = self._loss(trainer)
        if loss is None:
            return
        if trainer.sanity_checking or trainer.global_step == 0:
            self._before = loss
            self._before_is_partial = trainer.sanity_checking and (
                trainer.num_sanity_val_batches != trainer.num_val_batches
            )
        else:
            self._after, self._after_step = loss, trainer.global_step

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on rank 0."""
        if trainer.is_global_zero:
            print(self.report(), flush=True)

    def report(self) -> str:
        """One line, e.g. "validation perplexity: 4187.2 before, 61.3 after 300 steps"."""
        if self._before is None and self._after is None:
            return f"validation perplexity: unknown, because no validation logged {self.monitor}"
        if self._before is None:
            before = "unknown before (num_sanity_val_steps=-1 measures it)"
        else:
            part = " (on the first batches only)" if self._before_is_partial else ""
            before = f"{_show(self._before)} before{part}"
        if self._after is None:
            return f"validation perplexity: {before}, unknown after, because no validation ran since"
        return f"validation perplexity: {before}, {_show(self._after)} after {self._after_step} steps"

    @override
    def state_dict(self) -> dict[str, Any]:
        """The losses behind the report."""
        return {
            "before": self._before,
            "before_is_partial": self._before_is_partial,
            "after": self._after,
            "after_step": self._after_step,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue another run's report."""
        self._before = state_dict["before"]
        self._before_is_partial = state_dict["before_is_partial"]
        self._after = state_dict["after"]
        self._after_step = state_dict["after_step"]

    def _loss(self, trainer: Trainer) -> float | None:
        value = trainer.callback_metrics.get(self.monitor)
        return None if value is None else float(value)


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where that is too large for a float.

    Args:
        loss: Mean negative log-likelihood in nats per token.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _show(loss: float) -> str:
    value = perplexity(loss)
    return f"{value:.1f}" if value < 1e7 else f"{value:.2e}"
