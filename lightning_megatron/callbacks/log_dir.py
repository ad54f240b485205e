"""Base of callbacks that write to the Trainer's log directory."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class LogDirCallback(Callback):
    """Callback that writes to the log directory of the first logger, or to ``default_root_dir`` without loggers."""

    _log_dir: Path | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the directory: the Trainer's ``log_dir`` is a broadcast, which every rank must join."""
        self._log_dir = Path(trainer.log_dir or trainer.default_root_dir)
