"""Train step of BERT: masked language modeling with sentence order, and fine-tuning for classification and questions.

Each target has a weight in a prepared tensor called ``..._mask``, 0 for no target. Losses are sums divided by sums of
weights, so that any split of a batch into microbatches gives the same means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.engine.objective import Batch, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import CLASSIFICATION, ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.base import MaskedLossStep
from lightning_megatron.steps.labels import Labels, check_classes, class_targets
from lightning_megatron.steps.metrics import WeightedMean

MEGATRON_NAMES = {
    "text": "input_ids",
    "types": "token_type_ids",
    "padding_mask": "attention_mask",
    "is_random": "next_sentence_label",
}
"""Keys of Megatron's indexed samples, and Hugging Face's names for them."""

_INPUTS = ("attention_mask", "token_type_ids", "position_ids")
"""Inputs of the model other than the tokens."""


class _Head(NamedTuple):
    """Keys of a loss term's labels, targets and weights."""

    labels: str
    """Key of the labels in a batch."""
    targets: str = "targets"
    """Key of the targets in a prepared batch."""
    mask: str = "loss_mask"
    """Key of the target weights in a prepared batch."""
    per_token: bool = False
    """Whether labels are per token, not per row."""


_HEADS: dict[str, dict[str, _Head]] = {
    "pretraining": {
        "lm_loss": _Head("labels", per_token=True),
        "sop_loss": _Head("next_sentence_label", "order", "order_mask"),
    },
    "masked_lm": {"lm_loss": _Head("labels", per_token=True)},
    "sequence_classification": {"label_loss": _Head("labels")},
    "token_classification": {"label_loss": _Head("labels", per_token=True)},
    "question_answering": {
        "start_loss": _Head("start_positions", "start", "start_mask"),
        "end_loss": _Head("end_positions", "end", "end_mask"),
    },
}
"""Loss terms of each task. The model computes ``lm_loss``; others are cross-entropies or follow ``problem_type``."""

_OPTIONAL = {"token_classification": ("loss_mask",)} | dict.fromkeys(
    ("pretraining", "masked_lm"), ("loss_mask", "truncated", "next_sentence_label")
)
"""Optional keys of a batch, by task."""


@checks_options
class BertTrainStep(MaskedLossStep):
    """Loss of a BERT's task; each term is a mean over its targets in the global batch.

    Inputs are Hugging Face's, [b, s] each: ``input_ids`` and, optionally, ``attention_mask`` (1 for tokens and 0 for
    padding; or numbers of segments that do not attend to each other), ``token_type_ids``, ``position_ids``; or
    Megatron's ``text``, ``padding_mask``, ``types``. Any batch may have ``sample_mask`` [b], weights of the rows.

    ==========================  =======================================================================================
    ``pretraining``             ``lm_loss`` of ``labels`` [b, s] and ``sop_loss`` of ``next_sentence_label`` (or
                                ``is_random``) [b]
    ``masked_lm``               ``lm_loss`` of ``labels`` [b, s]
    ``sequence_classification``  ``label_loss`` of ``labels``: float [b] or [b, n] regression, int [b] single-label,
                                float [b, n] multi-label classification
    ``token_classification``    ``label_loss`` of ``labels`` [b, s]
    ``question_answering``      ``start_loss`` and ``end_loss`` of ``start_positions`` and ``end_positions`` [b], half
                                of the cross-entropies, so that their sum is Hugging Face's loss
    ==========================  =======================================================================================

    Labels of -100 (and -1, Megatron's) are ignored; ``loss_mask`` [b, s] has weights of per-token labels.
    """

    architecture = "bert"

    def __init__(self, binary_head: bool = True) -> None:
        """Set the options.

        Args:
            binary_head: Whether pretraining includes the sentence order loss; other tasks refuse False.
        """
        self.binary_head = binary_head

    def bind(self, model: ModelConfig) -> None:
        """Set the model to train, and choose the loss terms by its task.

        Raises:
            ConfigError: If the model is no BERT, or ``binary_head``, ``num_labels`` or ``problem_type`` do not fit the
                task.
        """
        super().bind(model)
        if not self.binary_head and model.task != "pretraining":
            raise ConfigError(
                f"binary_head=False: expected task='pretraining', whose second head it leaves out, got {model.task!r}; "
                "leave it out"
            )
        self._heads = dict(_HEADS[model.task])
        if not self.binary_head:
            self._heads.pop("sop_loss", None)
        self.loss_terms = tuple(self._heads)  # type: ignore[misc]
        self.masks = {name: head.mask for name, head in self._heads.items()}
        self._labels = Labels(model) if model.task in CLASSIFICATION else None
        if model.task == "question_answering" and model.num_labels != 2:
            raise ConfigError(
                f"num_labels={model.num_labels}: expected 2 for task='question_answering'; use num_labels=2"
            )

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and values out of range; drop an attention mask of ones.

        Attention without a mask is faster, and the check is cheap on the host. Batches of a subclass with its own
        ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not BertTrainStep.prepare_batch:
            return
        renamed = self._renamed(batch)
        tokens = renamed["input_ids"]
        batch_checks.check_tokens("input_ids", tokens, self.model)
        rows, length = tokens.shape
        batch_checks.check_token_inputs(renamed, rows, length, self.model)
        self._check_first_tokens(renamed)
        for head in self._heads.values():
            self._check_labels(head, renamed)
            if head.per_token and head.labels == "labels":
                batch_checks.warn_of_padding_that_predicts(renamed, renamed["labels"] >= 0)
        mask = renamed.get("attention_mask")
        if mask is not None and bool((mask == 1).all()):
            del batch["attention_mask" if "attention_mask" in batch else "padding_mask"]

    def _check_first_tokens(self, batch: Batch) -> None:
        reads_first_token = (
            self.model.task == "sequence_classification" or "sop_loss" in self._heads
        )
        if not reads_first_token or "attention_mask" not in batch:
            return
        padded = batch["attention_mask"][:, 0] == 0
        if "sample_mask" in batch:
            padded &= batch["sample_mask"] != 0
        if padded.any():
            raise DataError(
                f"attention_mask[{int(padded.nonzero()[0])}, 0] is 0, and the head reads that token; pad on the right"
            )

    def _check_labels(self, head: _Head, batch: Batch) -> None:
        name = head.labels
        labels = batch[name]
        rows, length = batch["input_ids"].shape
        if self._labels is not None:
            self._labels.check(labels, rows, length)
            return
        check_classes(
            name,
            labels,
            rows,
            length,
            per_token=head.per_token,
        )
        if name == "labels":
            if "loss_mask" in batch:
                labels = labels.masked_fill(batch["loss_mask"] == 0, base.IGNORE_INDEX)
            limit = self.model.vocab_size
            rule = "vocab_size"
        elif name == "next_sentence_label":
            limit = 2
            rule = "sentence orders"
        else:
            return
        batch_checks.check_range(name, labels, limit, rule, base.IGNORED_LABELS)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``tokens`` [b, s] int64, mask, token types and positions if any, and targets with their weights.

        Raises:
            DataError: If a key is unknown or missing.
        """
        renamed = self._renamed(batch)
        prepared = {"tokens": renamed["input_ids"].long()}
        for name in _INPUTS:
            if name in renamed:
                prepared[name] = renamed[name].long()
        length = renamed["input_ids"].shape[1]
        for head in self._heads.values():
            labels = renamed[head.labels]
            if self._labels is not None:
                targets, counted = self._labels.targets(labels)
            else:
                targets, counted = self._class_targets(head, labels, length)
            prepared[head.targets] = targets
            prepared[head.mask] = base.target_weights(counted, renamed)
        return prepared

    def _class_targets(
        self,
        head: _Head,
        labels: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        labels = labels.long()
        if not head.per_token:
            labels = labels.reshape(-1)
        if self.model.task == "question_answering":
            # As in Hugging Face, negative positions count as 0, and positions after the row are ignored.
            labels = labels.clamp(min=0).masked_fill(labels >= length, base.IGNORE_INDEX)
        return class_targets(labels)

    def _renamed(self, batch: Batch) -> Batch:
        """Return the batch by Hugging Face's names."""
        task = self.model.task
        required = {"input_ids": ""}
        for head in self._heads.values():
            required[head.labels] = ""
        if "next_sentence_label" in required:
            required["next_sentence_label"] = ", or use BertTrainStep(binary_head=False)"
        known = {
            *_INPUTS,
            "sample_mask",
            *required,
            *_OPTIONAL.get(task, ()),
        }
        return batch_checks.rename_keys(
            batch, known, required, f"BertTrainStep for task {task!r}", MEGATRON_NAMES
        )

    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run a microbatch: losses or logits on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        mask = batch.get("attention_mask")
        if mask is not None and self.model.task == "question_answering":
            # The softmax over positions includes padding, which must attend to tokens as in Hugging Face. As a segment
            # of its own it would attend to padding.
            mask = (mask == 0)[:, None, None, :]
        labels = None
        if self.model.has_output_layer:
            labels = batch["targets"]
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            mask,
            batch.get("token_type_ids"),
            labels=labels,
        )
        return output, partial(self.loss_func, batch)

    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the loss terms of the task.

        Args:
            batch: The prepared microbatch.
            output: The output of ``BertChunk.forward``.
        """
        terms = {}
        outputs = self._head_outputs(output)
        for (name, head), losses in zip(self._heads.items(), outputs, strict=False):
            if name != "lm_loss":
                losses = self._losses(losses.float(), batch[head.targets])
            terms[name] = base.loss_term(losses, batch[head.mask])
        if self.model.task == "pretraining" and "sop_loss" not in terms:
            # Gives the unused pooler and binary head zero gradients: gradient reduction waits for every parameter.
            unused = 0.0 * output[1].float().sum()
            term = terms["lm_loss"]
            terms["lm_loss"] = term._replace(sum=term.sum + unused)
        return terms

    def _head_outputs(self, output: Output) -> tuple[Tensor, ...]:
        """Output of each loss term: per-token losses [b, s], or logits [b, n] or [b, s, n]."""
        if self.model.task == "question_answering":
            return output.unbind(-1)  # type: ignore[no-any-return]
        if isinstance(output, tuple):
            return output
        return (output,)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._labels is not None:
            return self._labels.losses(logits, targets)
        losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        if self.model.task == "question_answering":
            losses = 0.5 * losses
        return losses

    def metrics(self) -> dict[str, Metric]:
        """Return ``perplexity`` and ``sop_accuracy``, or for labels ``accuracy`` and ``f1`` (regression: ``mse``).

        Question answering: ``exact_match``, the fraction of rows whose predicted start and end are both correct.
        """
        if self._labels is not None:
            return self._labels.metrics()
        if "start_loss" in self._heads:
            return {"exact_match": WeightedMean()}
        metrics = super().metrics()
        if "sop_loss" in self._heads:
            metrics["sop_accuracy"] = WeightedMean()
        return metrics

    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with one microbatch; targets with weight 0 do not count."""
        if self._labels is not None:
            self._labels.update_metrics(metrics, batch, output)
        elif "lm_loss" in self._heads:
            super().update_metrics(metrics, batch, output[0])
            if "sop_loss" in self._heads:
                is_correct = output[1].argmax(-1) == batch["order"]
                metrics["sop_accuracy"].update(is_correct, batch["order_mask"] > 0)
        elif "start_loss" in self._heads:
            starts, ends = output.argmax(1).unbind(1)
            is_correct = (starts == batch["start"]) & (ends == batch["end"])
            is_counted = (batch["start_mask"] > 0) & (batch["end_mask"] > 0)
            metrics["exact_match"].update(is_correct, is_counted)
