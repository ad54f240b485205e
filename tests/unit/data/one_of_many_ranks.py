"""A Trainer without processes: one rank of a layout, and a module that keeps what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from numpy.typing import NDArray

from lightning_megatron.datamodules import IndexedDataModule
from tests.unit.data.corpus import write_corpus

SEQ_LENGTH = 8


class OneOfManyRanks(SingleDeviceStrategy):
    """A single process that plays one rank of a layout, and its first one where data are opened."""

    def __init__(self, dp: int = 1, dp_rank: int = 0, num_microbatches: int = 1) -> None:
        super().__init__("cpu")
        self.data_parallel_size, self.data_parallel_rank = dp, dp_rank
        self.num_microbatches = num_microbatches
        self.tp, self.sequence_parallel = 1, False
        self.is_data_source = True


class Recorder(LightningModule):
    """Keeps what it is given, and stops by an exception if told to."""

    def __init__(self, early_question: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.train_rows: list[torch.Tensor] = []
        self.val_batches: list[dict[str, torch.Tensor]] = []
        self._early_question = early_question

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        (rows,) = batch.values()
        self.train_rows.append(rows)
        return self.weight * 0.0

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.val_batches.append(batch)

    def test_step(self, batch: dict[str, torch.Tensor]) -> None:
        self.val_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._early_question:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def rows(self) -> NDArray[np.int64]:
        return torch.cat(self.train_rows).numpy()


def make_trainer(folder: Path, strategy: OneOfManyRanks, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    return Trainer(
        default_root_dir=folder,
        strategy=strategy,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )


def make_documents(folder: Path) -> list[NDArray[np.uint16]]:
    """Documents of the dataset ``corpus`` in ``folder``, whose splits leave ragged tails."""
    return write_corpus(folder / "corpus", 63, longest=20)


def make_data(tmp_path: Path, **options: Any) -> IndexedDataModule:
    defaults: dict[str, Any] = {"split": "8,1,1", "seq_length": SEQ_LENGTH, "micro_batch_size": 2}
    return IndexedDataModule(str(tmp_path / "corpus"), **(defaults | options))
