"""``ProgressLine``: progress of a run in one line."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from typing_extensions import override

from lightning_megatron.foreign_names import checks_options


@checks_options
class ProgressLine(ProgressBar):
    """Progress in one line: step, time, time left, and metrics logged with ``prog_bar=True``.

    Lightning's bars take several rows of a narrow terminal, and show nothing, or one endless line, in a file. On a
    terminal this is one row, truncated to the terminal's width; in a file it is a line every ``every_seconds``.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        """Set how often to write a line to a file.

        Args:
            every_seconds: Time between two lines, if the output is not a terminal.
        """
        super().__init__()
        self.every_seconds = every_seconds
        self._is_enabled = True
        self._first_step = 0
        self._start_time = 0.0
        self._next_time = 0.0

    @override
    def disable(self) -> None:
        """Show nothing, as on ranks other than 0."""
        self._is_enabled = False

    @override
    def enable(self) -> None:
        """Show lines again."""
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the first step and the start time."""
        self._first_step = trainer.global_step
        self._start_time = time.monotonic()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the step, the first one at once, to tell that training has started."""
        # The last step is shown after its validation.
        if trainer.global_step < trainer.estimated_stepping_batches:
            is_first = trainer.global_step == self._first_step + 1
            self._show(lambda: self._line(trainer), now=is_first)

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the last step with the metrics of the validation after it."""
        self._show(lambda: self._line(trainer), now=True, end="\n")

    @override
    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Show the number of batches so far."""
        stage: Any = trainer.state.stage
        self._show(lambda: f"{stage.value.replace('_', ' ')}: batch {arguments[3] + 1}")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _line(self, trainer: Trainer) -> str:
        step = trainer.global_step
        seconds = time.monotonic() - self._start_time
        total: float = trainer.estimated_stepping_batches
        parts = [f"step {step}", _format_time(seconds)]
        if 0 < total < math.inf:
            seconds_per_step = seconds / max(step - self._first_step, 1)
            remaining = seconds_per_step * (total - step)
            parts[0] = f"step {step}/{total:.0f}"
            parts.append(f"{_format_time(remaining)} left")
        for name, value in trainer.progress_bar_metrics.items():
            number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
            parts.append(f"{name} {number}")
        return ", ".join(parts)

    def _show(
        self,
        line: Callable[[], str],
        *,
        now: bool = False,
        end: str = "\r",
    ) -> None:
        current = time.monotonic()
        if not self._is_enabled or not (now or current >= self._next_time):
            return
        if sys.stdout.isatty():
            self._next_time = current + 0.1
            width = shutil.get_terminal_size().columns - 1
            print(f"\x1b[K{line()[:width]}", end=end, flush=True)
        else:
            self._next_time = current + self.every_seconds
            print(line(), flush=True)


def _format_time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
