"""How does a model learn that returns one loss per token? What the steps of GPT and T5 share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torchmetrics import Metric

from lightning_megatron.steps.base import Batch, LossTerm, TrainStep, with_last_row_repeated
from lightning_megatron.steps.metrics import Perplexity


class TokenLossStep(TrainStep):
    """The mean of the tokens' losses; prepared batches have a ``loss_mask`` [b, s], fp32: how much each counts."""

    loss_terms: ClassVar[tuple[str, ...]] = ("lm_loss",)

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row with an empty loss mask."""
        padded = with_last_row_repeated(batch, num_rows)
        padded["loss_mask"][batch["loss_mask"].shape[0] :] = 0
        return padded

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The number of targets, known from the masks alone."""
        return {"lm_loss": batch["loss_mask"].sum()}

    def loss_func(self, batch: Batch, output: torch.Tensor) -> dict[str, LossTerm]:
        """The masked sum of the per-token losses.

        Args:
            batch: The prepared microbatch.
            output: Per-token cross-entropy, [b, s], fp32.
        """
        loss_mask = batch["loss_mask"]
        return {"lm_loss": LossTerm((output.float() * loss_mask).sum(), loss_mask.sum())}

    def metrics(self) -> dict[str, Metric]:
        """``perplexity`` of the targets."""
        return {"perplexity": Perplexity()}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: torch.Tensor) -> None:
        """Take in the losses of one microbatch, each with its weight."""
        cast("Perplexity", metrics["perplexity"]).update(output.float(), batch["loss_mask"])
