"""``PerplexityReport``: validation perplexity before and after training."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.callbacks.intervals import is_partial_validation
from lightning_megatron.foreign_names import checks_options


@checks_options
class PerplexityReport(Callback):
    """Prints the validation perplexity before and after training when ``fit`` ends; ``val_perplexity`` is in the log.

    "Before" is the validation that the Trainer runs before the first step, with ``Trainer(num_sanity_val_steps=-1)`` on
    the whole validation set; it is saved in checkpoints. The loss must be logged by ``validation_step``.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        """Set the metric to read.

        Args:
            monitor: Name of the logged validation loss, in nats per token.
        """
        self.monitor = monitor
        self._reset()

    def _reset(self) -> None:
        self._state: dict[str, Any] = {
            "before": None,
            "before_is_partial": False,
            "after": None,
            "after_step": 0,
        }

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear the losses of an earlier run; those of a resumed run are loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self._reset()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss for the report."""
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is None:
            return
        if trainer.sanity_checking or trainer.global_step == 0:
            self._state |= {
                "before": float(loss),
                "before_is_partial": is_partial_validation(trainer),
            }
        else:
            self._state |= {"after": float(loss), "after_step": trainer.global_step}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on rank 0."""
        if trainer.is_global_zero:
            print(self.report(), flush=True)

    def report(self) -> str:
        """One line, e.g. "validation perplexity: 4187.2 before, 61.3 after 300 steps"."""
        before = self._state["before"]
        after = self._state["after"]
        if before is None and after is None:
            return f"validation perplexity: unknown, because no validation logged {self.monitor}"
        initial = "unknown before (num_sanity_val_steps=-1 measures it)"
        if before is not None:
            part = " (on the first batches only)" if self._state["before_is_partial"] else ""
            initial = f"{_perplexity(before)} before{part}"
        if after is None:
            return (
                f"validation perplexity: {initial}, unknown after, because no validation ran since"
            )
        return f"validation perplexity: {initial}, {_perplexity(after)} after {self._state['after_step']} steps"

    @override
    def state_dict(self) -> dict[str, Any]:
        """The losses of the report."""
        return dict(self._state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved report."""
        self._state = dict(state_dict)


def _perplexity(loss: float) -> str:
    value = math.inf if loss > 700 else math.exp(loss)
    return f"{value:.1f}" if value < 1e7 else f"{value:.2e}"
