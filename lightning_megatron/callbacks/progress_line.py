"""Show the progress of a run as one line of text: rewritten on a terminal, repeated every few seconds in a file."""

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


class ProgressLine(ProgressBar):
    """Step, time, time left, and what is logged with ``prog_bar=True``.

    Lightning's bars take several rows of a narrow terminal, and show nothing, or one endless line, in a file. On a
    terminal this is one row, cut off where the terminal ends; in a file it is a line every ``every_seconds``.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        """Set how often a file gets a line.

        Args:
            every_seconds: Time between two lines, if the output is no terminal.
        """
        super().__init__()
        self.every_seconds = every_seconds
        self._is_enabled = True
        self._first_step, self._began, self._next = 0, 0.0, 0.0

    @override
    def disable(self) -> None:
        """Show nothing; ranks other than 0 do so."""
        self._is_enabled = False

    @override
    def enable(self) -> None:
        """Show lines again."""
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._first_step, self._began = trainer.global_step, time.monotonic()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the step; the first one at once, so that one sees that training has begun, and the last one."""
        is_last = trainer.global_step >= trainer.estimated_stepping_batches
        self._show_step(trainer, now=is_last or trainer.global_step == self._first_step + 1, end=is_last)

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the last step with the validation after it."""
        self._show_step(trainer, now=True, end=True)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Show how many batches have been read."""
        stage: Any = trainer.state.stage
        self._show(lambda: f"{stage.value.replace('_', ' ')}: batch {arguments[3] + 1}")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _show_step(self, trainer: Trainer, *, now: bool, end: bool) -> None:
        def line() -> str:
            step, seconds = trainer.global_step, time.monotonic() - self._began
            total: float = trainer.estimated_stepping_batches
            parts = [f"step {step}", _clock(seconds)]
            if 0 < total < math.inf:
                left = seconds / max(step - self._first_step, 1) * (total - step)
                parts = [f"step {step}/{total:.0f}", parts[1], f"{_clock(left)} left"]
            for name, value in trainer.progress_bar_metrics.items():
                parts.append(f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}")
            return ", ".join(parts)

        self._show(line, now=now, end=end)

    def _show(self, line: Callable[[], str], *, now: bool = False, end: bool = False) -> None:
        seconds = time.monotonic()
        if not self._is_enabled or not (now or seconds >= self._next):
            return
        if sys.stdout.isatty():
            self._next = seconds + 0.1
            row = line()[: shutil.get_terminal_size().columns - 1]
            print(f"\x1b[K{row}", end="\n" if end else "\r", flush=True)
        else:
            self._next = seconds + self.every_seconds
            print(line(), flush=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
