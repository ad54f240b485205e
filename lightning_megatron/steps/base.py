"""Interface of a training objective, and the base of those whose batches hold a weight for each target.

A ``TrainStep`` gets one data-parallel rank's batch once per optimizer step (``prepare_batch``) and each microbatch of
it once (``get_batch``, ``forward_step``, ``loss_func``), inside Megatron's pipeline schedule. None of its methods may
log or communicate: they run many times per step, and the loss only on the last pipeline stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.engine.objective import Batch, FrozenPass, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Architecture, ModelConfig
from lightning_megatron.steps.metrics import Perplexity

__all__ = ["Batch", "LossFunc", "LossTerm", "Output", "TrainStep"]

IGNORE_INDEX = -100
"""Hugging Face's label for "no target here"."""

IGNORED_LABELS = (-100, -1)
"""Hugging Face's and Megatron's labels for "no target here"."""


def loss_term(losses: Tensor, weights: Tensor) -> LossTerm:
    """Weighted sum of losses and sum of weights, both of the same shape."""
    weighted = losses.float() * weights
    return LossTerm(weighted.sum(), weights.sum())


def target_weights(mask: Tensor, batch: Batch) -> Tensor:
    """Weights of targets, fp32: ``mask``, [b] or [b, n], times ``sample_mask`` and ``loss_mask`` if in the batch."""
    mask = mask.float()
    if "sample_mask" in batch:
        row_weights = batch["sample_mask"].float()
        if mask.dim() > 1:
            row_weights = row_weights[:, None]
        mask = mask * row_weights
    if "loss_mask" in batch and mask.dim() > 1:
        mask = mask * batch["loss_mask"].float()
    return mask


def packed_segments(inputs: Batch, model: ModelConfig) -> Batch:
    """Inputs of a GPT, with the segments that ``position_ids`` begin if there is no ``attention_mask``.

    A position that does not follow the one before it begins a text of its own, as in transformers, whose
    ``DataCollatorWithFlattening`` gives no mask. A mask, also of ones, says otherwise. OPT is the exception there, too.

    Args:
        inputs: ``position_ids`` and ``attention_mask``, [b, s] each, if given.
        model: The model that reads them.
    """
    if "position_ids" not in inputs or "attention_mask" in inputs or model.position_offset:
        return inputs
    begins = F.pad(inputs["position_ids"].diff(dim=-1) != 1, (1, 0))
    return {**inputs, "attention_mask": 1 + begins.cumsum(-1)}


class TrainStep(ABC):
    """Training objective: from batch to loss. Subclass it, or override the method of ``GPTTrainStep`` that differs.

    Attributes:
        loss_terms: Names of the terms that ``loss_func`` returns; the training loss is the sum of their means.
        logged_terms: Names of further terms that it returns, whose means are logged and not part of the loss.
        sequences_per_row: Number of sequences that the model reads for each row of a prepared batch, in
            ``forward_step``; more than 1 if a row is a pair or a group.
        model: Config of the trained model, set by ``bind``.
    """

    loss_terms: ClassVar[tuple[str, ...]]
    logged_terms: ClassVar[tuple[str, ...]] = ()
    sequences_per_row: ClassVar[int] = 1

    def bind(self, model: ModelConfig) -> None:
        """Set the model to train; called once, before anything else, when a module takes the step.

        Raises:
            ConfigError: If this objective cannot train that model.
        """
        self.model = model

    def check_batch(self, batch: Batch) -> None:
        """Check the values of a batch while it is still on the host, on the one rank that reads data.

        Its errors are raised on every rank of the replica. A step whose values are always in range need not override
        it.

        Args:
            batch: Batch of the DataLoader, on the CPU; tensors without effect, such as a mask that hides nothing, may
                be removed from it.

        Raises:
            DataError: If a token or a label is out of range, with its name, its value and the range.
        """
        del batch

    @abstractmethod
    def prepare_batch(self, batch: Batch) -> Batch:
        """Convert a batch of the DataLoader to the form of this step, on every rank, once per optimizer step.

        Args:
            batch: Tensors of one data-parallel rank, with ``micro_batch_size * num_microbatches`` rows.

        Returns:
            Tensors with the same number of rows, which are split into microbatches along the first axis.
        """

    @abstractmethod
    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Pad a prepared batch to ``num_rows`` rows with rows without loss (for ragged last batches)."""

    @abstractmethod
    def seq_length(self, batch: Batch) -> int:
        """Tokens per row of a prepared batch: the sequence length of activations between pipeline stages."""

    def split_lengths(self, batch: Batch) -> Mapping[str, int]:
        """Sequence lengths that context and sequence parallelism must be able to split, by their name in errors."""
        return {"seq_length": self.seq_length(batch)}

    def counts(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Number of targets of each loss term in a prepared batch, or None if unknown before the forward pass.

        It must equal the sum of the counts that ``loss_func`` returns for the microbatches. Steps with several terms
        must return it; a step with one term may return None, which costs one more pass over the gradients.
        """
        return None

    def frozen_pass(self, batch: Batch) -> FrozenPass | None:
        """Return the forward pass of a frozen model that a prepared batch needs before the step; None for none."""
        del batch
        return None

    def get_batch(self, data_iterator: Iterator[Batch]) -> Batch:
        """Return the next microbatch."""
        return next(data_iterator)

    @abstractmethod
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run the forward pass of a microbatch through a model chunk of this rank.

        Args:
            data_iterator: Yields the prepared microbatches in order.
            model: The chunk; before the last stage its output is the hidden state for the next stage, [s, b, h].

        Returns:
            The output, and the loss function that the last stage calls with it.
        """

    @abstractmethod
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Compute the loss terms of a microbatch, on the last stage.

        Args:
            batch: The microbatch of ``output``.
            output: Output of the last stage's model.
        """

    def metrics(self) -> dict[str, Metric]:
        """Create the metrics of validation and test, by their names in the log without ``val_`` and ``test_``.

        They are updated on the last stage only, and synchronized over its data-parallel ranks at the end of an epoch.
        """
        return {}

    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update ``metrics`` with a microbatch of an evaluation, on the last stage; rows without loss must not count.

        Args:
            metrics: The metrics of ``metrics()``.
            batch: The prepared microbatch.
            output: Output of the last stage's model.
        """
        del metrics, batch, output


class MaskedLossStep(TrainStep):
    """Train step whose prepared batches contain a weight for each target."""

    architecture: ClassVar[Architecture]
    """Architecture of the models that it trains."""
    loss_terms: ClassVar[tuple[str, ...]] = ("lm_loss",)
    masks: Mapping[str, str] = {"lm_loss": "loss_mask"}
    """Batch key of the target weights, by loss term."""

    def bind(self, model: ModelConfig) -> None:
        """Set the model to train.

        Raises:
            ConfigError: If the model has a different architecture, with the name of the right train step.
        """
        if model.architecture != self.architecture:
            raise ConfigError(
                f"{type(self).__name__} trains {self.architecture.upper()}s, and {model.family} is a "
                f"{model.architecture.upper()}; use train_step={model.architecture!r}"
            )
        super().bind(model)

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Pad the batch to ``num_rows`` by repeating the last row, with target weights of 0."""
        rows = next(iter(batch.values())).shape[0]
        padded = {}
        for name, tensor in batch.items():
            repeated = tensor[-1:].expand(num_rows - rows, *tensor.shape[1:])
            padded[name] = torch.cat([tensor, repeated])
        for mask in self.masks.values():
            padded[mask][rows:] = 0
        return padded

    def seq_length(self, batch: Batch) -> int:
        """Return the number of tokens per row."""
        return batch["tokens"].shape[1]

    def counts(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Return the sum of target weights of each term, known from the masks alone."""
        return {term: batch[mask].sum() for term, mask in self.masks.items()}

    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sum of the per-token losses.

        Args:
            batch: The prepared microbatch.
            output: Per-token cross-entropy, [b, s], fp32.
        """
        return {"lm_loss": loss_term(output, batch["loss_mask"])}

    def metrics(self) -> dict[str, Metric]:
        """Return ``perplexity`` of the targets."""
        return {"perplexity": Perplexity()}

    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with the weighted losses of one microbatch."""
        metrics["perplexity"].update(output.float(), batch["loss_mask"])
