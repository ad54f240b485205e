"""What the objectives share: sums over targets, metrics weighed by them, and how targets are told from tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.engine.train_step import Batch, LossFunc, LossTerm, Output, TrainStep
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Architecture, ModelConfig

__all__ = ["Batch", "LossFunc", "LossTerm", "Output", "TrainStep"]

IGNORE_INDEX = -100
"""Hugging Face's label for "no target here"."""


def check_trains(step: TrainStep, architecture: Architecture, model: ModelConfig) -> None:
    """Raise unless ``model`` is of the architecture that ``step`` is for.

    Raises:
        ConfigError: With the name of the step that is.
    """
    if model.architecture != architecture:
        raise ConfigError(
            f"{type(step).__name__} trains {architecture.upper()}s, and {model.family} is a "
            f"{model.architecture.upper()}; use train_step={model.architecture!r}"
        )


def has_own_batches(step: TrainStep, kind: type[TrainStep]) -> bool:
    """Whether a subclass of ``kind`` prepares batches in its own way; it may have keys that ``kind`` cannot check."""
    return type(step).prepare_batch is not kind.prepare_batch


def masked_term(losses: Tensor, weights: Tensor) -> LossTerm:
    """The term of losses and their weights, both of any one shape."""
    return LossTerm((losses.float() * weights).sum(), weights.sum())


def without_last_rows(batch: Batch, num_rows: int, weights: tuple[str, ...]) -> Batch:
    """A copy of ``batch`` grown to ``num_rows`` rows by copies of the last one, whose ``weights`` are 0."""
    rows = next(iter(batch.values())).shape[0]
    padded = {k: torch.cat([v, v[-1:].expand(num_rows - rows, *v.shape[1:])]) for k, v in batch.items()}
    for name in weights:
        padded[name][rows:] = 0
    return padded


class TokenLossStep(TrainStep):
    """The mean of the tokens' losses; prepared batches have a ``loss_mask`` [b, s], fp32: how much each counts."""

    loss_terms: ClassVar[tuple[str, ...]] = ("lm_loss",)

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row with an empty loss mask."""
        return without_last_rows(batch, num_rows, ("loss_mask",))

    def counts(self, batch: Batch) -> Mapping[str, Tensor]:
        """The number of targets, known from the masks alone."""
        return {"lm_loss": batch["loss_mask"].sum()}

    def loss_func(self, batch: Batch, output: Tensor) -> dict[str, LossTerm]:
        """The masked sum of the per-token losses.

        Args:
            batch: The prepared microbatch.
            output: Per-token cross-entropy, [b, s], fp32.
        """
        return {"lm_loss": masked_term(output, batch["loss_mask"])}

    def metrics(self) -> dict[str, Metric]:
        """``perplexity`` of the targets."""
        return {"perplexity": Perplexity()}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Tensor) -> None:
        """Take in the losses of one microbatch, each with its weight."""
        cast("Perplexity", metrics["perplexity"]).update(output.float(), batch["loss_mask"])


# ---- metrics --------------------------------------------------------------------------------------------------------


class WeightedMean(Metric):
    """The mean of values by their weights, NaN if nothing has any; a NaN among the values is not dropped."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Take in values and their weights, both of any one shape."""
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """[]: the mean."""
        return self.total / self.weight


class Perplexity(WeightedMean):
    """exp of the mean loss over all tokens with a weight."""

    def compute(self) -> Tensor:
        """[]: the perplexity."""
        return torch.exp(super().compute())


def predicted_tokens(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """The token with the largest logit, of several the first, as ``argmax`` over the whole vocabulary finds it.

    Every rank of ``tp_group`` must call; two numbers a position travel.

    Args:
        logits: [..., v/tp], this rank's shard; padding of the vocabulary is -inf.
        tp_group: The TP group.

    Returns:
        [...], int64, the same on every rank of the group.
    """
    largest, token = logits.float().max(dim=-1)
    token = token + dist.get_rank(tp_group) * logits.shape[-1]
    if dist.get_world_size(tp_group) == 1:
        return token
    largest_of_shard = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    token = token.masked_fill(largest_of_shard < largest, torch.iinfo(token.dtype).max)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    return token
