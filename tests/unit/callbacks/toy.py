"""A small ordinary Lightning run, with losses that are known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader


class ToyModule(LightningModule):
    """Logs ``losses[step]`` while training and ``val_losses`` in turn while validating."""

    def __init__(self, losses: list[float], val_losses: list[float] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.losses = losses
        self.val_losses = list(val_losses or [])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("train_loss", self.losses[self.trainer.global_step])
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.val_losses:
            self.log("val_loss", self.val_losses[0])

    def on_validation_end(self) -> None:
        if self.val_losses:
            del self.val_losses[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(rows: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(rows, 1))  # type: ignore[arg-type]


def toy_trainer(folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 6,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return Trainer(default_root_dir=folder, callbacks=callbacks, **{**settings, **options})
