"""What does a task of a BERT need of its step? Targets, losses and metrics; and those of masked tokens.

Each target has a weight in a tensor called ``..._mask``, 0 for none; sums are over weights, so any cut of a batch into
rows gives the same means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch, LossTerm, Output
from lightning_megatron.steps.checks import check_integers, check_labels, check_rows, check_shape
from lightning_megatron.steps.masks import IGNORE_INDEX
from lightning_megatron.steps.metrics import Perplexity


class Objective(ABC):
    """What a task's labels mean; ``BertTrainStep`` does the rest."""

    terms: tuple[str, ...]
    """Names of the loss terms."""
    needed: tuple[str, ...]
    """Keys that a batch must have."""
    optional: tuple[str, ...] = ()
    """Keys that it may have."""
    masks: tuple[str, ...]
    """Prepared tensors with the targets' weights."""
    reads_padding = False
    """Whether logits at padding are used."""
    reads_first_token = False
    """Whether the head reads the first token of each row."""

    def hint(self, key: str) -> str:
        """What else a user can do who has no ``key``."""
        del key
        return ""

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Refuse labels of a wrong kind; ``batch`` has Hugging Face's names and checked inputs.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """

    @abstractmethod
    def targets(self, batch: Batch, rows: torch.Tensor) -> Batch:
        """The prepared targets and their masks.

        Args:
            batch: Has Hugging Face's names.
            rows: [b], fp32: the weight of each row.
        """

    def model_labels(self, batch: Batch) -> torch.Tensor | None:
        """The labels of which the model itself returns the losses, [b, s]; None to have its logits."""
        del batch
        return None

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Each term's number of targets in a prepared batch."""

    @abstractmethod
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """Each term of a prepared microbatch."""

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """New metrics."""

    @abstractmethod
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in one prepared microbatch."""


class MaskedTokens(Objective):
    """Which tokens stood where they were masked, and (pretraining) whether two sentences are in order.

    The model's output is the pair of the tokens' losses [b, s] and the order's logits [b, 2].
    """

    def __init__(self, model: ModelConfig, *, has_order: bool, learns_order: bool) -> None:
        """Choose the terms.

        Args:
            model: Tells the vocabulary.
            has_order: Whether the model has a head for the order of sentences.
            learns_order: Whether that head is to be trained.
        """
        self._model = model
        self._has_order = has_order
        self._learns_order = self.reads_first_token = has_order and learns_order
        order = ("next_sentence_label",)
        self.terms = ("lm_loss", "sop_loss") if self._learns_order else ("lm_loss",)
        self.masks = ("loss_mask", "order_mask") if self._learns_order else ("loss_mask",)
        self.needed = ("labels", *order) if self._learns_order else ("labels",)
        # Megatron's samples always carry the order, and whether they were cut.
        self.optional = ("loss_mask", "truncated", *(() if self._learns_order else order))

    @override
    def hint(self, key: str) -> str:
        return ", or use BertTrainStep(binary_head=False)" if key == "next_sentence_label" else ""

    @override
    def check(self, batch: Batch) -> None:
        labels = token_labels(batch)
        counted = labels if "loss_mask" not in batch else labels.masked_fill(batch["loss_mask"] == 0, IGNORE_INDEX)
        check_labels("labels", counted, self._model.vocab_size, "vocab_size")
        if self._learns_order:
            order = batch["next_sentence_label"]
            check_integers("next_sentence_label", order, "0: in order, 1: not")
            check_rows("next_sentence_label", order, labels.shape[0], 1, "one per row")
            check_labels("next_sentence_label", order, 2, "kinds of order")

    @override
    def targets(self, batch: Batch, rows: torch.Tensor) -> Batch:
        prepared = token_targets(batch, rows)
        if self._learns_order:
            order = batch["next_sentence_label"].long().reshape(-1)
            prepared |= {"order": order.clamp(min=0), "order_mask": (order >= 0) * rows}
        return prepared

    @override
    def model_labels(self, batch: Batch) -> torch.Tensor | None:
        return batch["targets"]

    @override
    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {term: batch[mask].sum() for term, mask in zip(self.terms, self.masks, strict=True)}

    @override
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        losses, order_logits = output
        counts = self.counts(batch)
        lm = (losses.float() * batch["loss_mask"]).sum()
        if self._has_order and not self._learns_order:
            # Its weights must have a gradient, if only zero: the engine waits for that of every weight.
            lm = lm + 0.0 * order_logits.float().sum()
        terms = {"lm_loss": LossTerm(lm, counts["lm_loss"])}
        if self._learns_order:
            order = F.cross_entropy(order_logits.float(), batch["order"], reduction="none")
            terms["sop_loss"] = LossTerm((order * batch["order_mask"]).sum(), counts["sop_loss"])
        return terms

    @override
    def metrics(self) -> dict[str, Metric]:
        order: dict[str, Metric] = {"sop_accuracy": MeanMetric()} if self._learns_order else {}
        return {"perplexity": Perplexity(), **order}

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        losses, order_logits = output
        metrics["perplexity"].update(losses, batch["loss_mask"])
        if self._learns_order:
            right = (order_logits.argmax(-1) == batch["order"]).float()
            metrics["sop_accuracy"].update(right, (batch["order_mask"] > 0).float())


def token_labels(batch: Batch) -> torch.Tensor:
    """A batch's labels [b, s], checked but for their range.

    Raises:
        DataError: If they are no integers, or of another shape than the tokens.
    """
    labels, shape = batch["labels"], tuple(batch["input_ids"].shape)
    check_integers("labels", labels, "one token or class at each place")
    check_shape("labels", labels, shape, "as input_ids")
    if "loss_mask" in batch:
        check_shape("loss_mask", batch["loss_mask"], shape, "as input_ids")
    return labels


def token_targets(batch: Batch, rows: torch.Tensor) -> Batch:
    """``targets`` [b, s] and their weights ``loss_mask`` [b, s], fp32.

    Args:
        batch: Has labels and, perhaps, weights of its own.
        rows: [b], fp32: the weight of each row.
    """
    labels = batch["labels"].long()
    mask = (labels >= 0) * rows[:, None]
    if "loss_mask" in batch:
        mask = mask * batch["loss_mask"]
    return {"targets": labels.clamp(min=0), "loss_mask": mask}
