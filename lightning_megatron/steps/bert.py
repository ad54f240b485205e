"""Train step of BERT: masked language modeling with sentence order, and fine-tuning for classification and questions.

Each target has a weight in a prepared tensor called ``..._mask``, 0 for no target. Losses are sums divided by sums of
weights, so that any split of a batch into microbatches gives the same means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Accuracy, F1Score, MeanSquaredError, Metric

from lightning_megatron.engine.objective import Batch, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError, DataError, require_choice
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig, ProblemType
from lightning_megatron.steps import base, batch_checks, metrics
from lightning_megatron.steps.base import MaskedLossStep

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
            binary_head: Whether pretraining includes the sentence order loss; no effect on other tasks.
        """
        self.binary_head = binary_head

    def bind(self, model: ModelConfig) -> None:
        """Set the model to train, and choose the loss terms by its task.

        Raises:
            ConfigError: If the model is no BERT, or its ``num_labels`` or ``problem_type`` does not fit its task.
        """
        super().bind(model)
        self._heads = {
            name: h
            for name, h in _HEADS[model.task].items()
            if self.binary_head or name != "sop_loss"
        }
        self.loss_terms = tuple(self._heads)  # type: ignore[misc]
        self.masks = {name: head.mask for name, head in self._heads.items()}
        per_row, n = model.task == "sequence_classification", model.num_labels
        self._problem: ProblemType | None = (
            model.problem_type if per_row else "single_label_classification"
        )
        if self._problem is not None:
            require_choice("problem_type", self._problem, get_args(ProblemType))
        if "label_loss" in self._heads and self._problem == "single_label_classification" and n < 2:
            raise ConfigError(
                f"num_labels={n}: expected at least 2 for task={model.task!r}; use num_labels=2, or "
                "problem_type='regression' for one value"
            )
        if model.task == "question_answering" and n != 2:
            raise ConfigError(
                f"num_labels={n}: expected 2 for task='question_answering'; use num_labels=2"
            )

    def _infer_problem(self, labels: Tensor) -> ProblemType:
        """Problem type of the config, else of the first batch, as ``MegatronBertForSequenceClassification`` does."""
        if self._problem is not None:
            return self._problem
        if self.model.num_labels == 1:
            return "regression"
        return (
            "multi_label_classification"
            if labels.is_floating_point()
            else "single_label_classification"
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
        batch_checks.check_token_inputs(
            renamed,
            tokens.shape[0],
            tokens.shape[1],
            self.model,
        )
        self._check_first_tokens(renamed)
        for head in self._heads.values():
            self._check_labels(head, renamed)
        if "attention_mask" in renamed and bool((renamed["attention_mask"] == 1).all()):
            del batch["attention_mask" if "attention_mask" in batch else "padding_mask"]

    def _check_first_tokens(self, batch: Batch) -> None:
        reads_first_token = (
            self.model.task == "sequence_classification" or "sop_loss" in self._heads
        )
        if not reads_first_token or "attention_mask" not in batch:
            return
        counted = batch["sample_mask"] != 0 if "sample_mask" in batch else True
        padded = (batch["attention_mask"][:, 0] == 0) & counted
        if padded.any():
            raise DataError(
                f"attention_mask[{int(padded.nonzero()[0])}, 0] is 0, and the head reads that token; pad on the right"
            )

    def _check_labels(self, head: _Head, batch: Batch) -> None:
        name, labels, model = head.labels, batch[head.labels], self.model
        (rows, length), n = batch["input_ids"].shape, model.num_labels
        if (problem := self._infer_problem(labels)) != "single_label_classification":
            rule = f"num_labels={n}, problem_type={problem!r}"
            if not labels.is_floating_point():
                raise DataError(
                    f"{name} is {labels.dtype} and must be a float type ({rule}); use {name}.float()"
                )
            batch_checks.check_values(name, labels, labels.isfinite(), "finite")
            batch_checks.check_shape(
                name,
                labels,
                rule,
                (rows, n),
                *([(rows,)] if n == 1 else []),
            )
            if problem == "multi_label_classification":
                batch_checks.check_values(
                    name,
                    labels,
                    (labels >= 0) & (labels <= 1),
                    f"in 0..1 ({rule})",
                )
            return
        shapes = [(rows, length)] if head.per_token else [(rows,), (rows, 1)]
        batch_checks.check_integers(
            name, labels, f"one per {'token' if head.per_token else 'row'}", *shapes
        )
        if name == "labels" and model.has_output_layer:
            counted = (
                labels.masked_fill(batch["loss_mask"] == 0, base.IGNORE_INDEX)
                if "loss_mask" in batch
                else labels
            )
            batch_checks.check_range(
                name,
                counted,
                model.vocab_size,
                "vocab_size",
                base.IGNORED_LABELS,
            )
        elif name == "labels":
            batch_checks.check_range(name, labels, n, "num_labels", base.IGNORED_LABELS)
        elif name == "next_sentence_label":
            batch_checks.check_range(name, labels, 2, "sentence orders", base.IGNORED_LABELS)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``tokens`` [b, s] int64, mask, token types and positions if any, and targets with their weights.

        Raises:
            DataError: If a key is unknown or missing.
        """
        renamed = self._renamed(batch)
        prepared = {
            "tokens": renamed["input_ids"].long(),
            **{n: renamed[n].long() for n in _INPUTS if n in renamed},
        }
        for head in self._heads.values():
            labels, length = renamed[head.labels], renamed["input_ids"].shape[1]
            self._problem = self._infer_problem(labels)
            if self._problem == "single_label_classification":
                labels = labels.long() if head.per_token else labels.long().reshape(-1)
                if self.model.task == "question_answering":
                    # As in Hugging Face, negative positions count as 0, and positions after the row are ignored.
                    labels = labels.clamp(min=0).masked_fill(labels >= length, base.IGNORE_INDEX)
                targets, counted = labels.clamp(min=0), labels >= 0
            else:
                targets = labels.float().reshape(-1, self.model.num_labels)
                counted = torch.ones_like(targets)
            prepared |= {
                head.targets: targets,
                head.mask: base.target_weights(counted, renamed),
            }
        return prepared

    def _renamed(self, batch: Batch) -> Batch:
        """Return the batch by Hugging Face's names."""
        task = self.model.task
        required = dict.fromkeys(("input_ids", *(head.labels for head in self._heads.values())), "")
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
        labels = batch["targets"] if self.model.has_output_layer else None
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            mask,
            batch.get("token_type_ids"),
            labels=labels,
        )
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """Return the loss terms of the task.

        Args:
            batch: The prepared microbatch.
            output: The output of ``BertChunk.forward``.
        """
        terms = {}
        for (name, head), head_output in zip(
            self._heads.items(), self._head_outputs(output), strict=False
        ):
            losses = (
                head_output
                if name == "lm_loss"
                else self._losses(head_output.float(), batch[head.targets])
            )
            terms[name] = base.loss_term(losses, batch[head.mask])
        if self.model.task == "pretraining" and "sop_loss" not in terms:
            # Gives the unused pooler and binary head zero gradients: gradient reduction waits for every parameter.
            unused = 0.0 * output[1].float().sum()
            terms["lm_loss"] = terms["lm_loss"]._replace(sum=terms["lm_loss"].sum + unused)
        return terms

    def _head_outputs(self, output: Output) -> tuple[Tensor, ...]:
        """Output of each loss term: per-token losses [b, s], or logits [b, n] or [b, s, n]."""
        if self.model.task == "question_answering":
            return output.unbind(-1)  # type: ignore[no-any-return]
        return output if isinstance(output, tuple) else (output,)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._problem == "regression":
            return (logits - targets).square()
        if self._problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        losses = F.cross_entropy(
            logits.movedim(-1, 1),
            targets,
            reduction="none",
        )
        return 0.5 * losses if self.model.task == "question_answering" else losses

    def metrics(self) -> dict[str, Metric]:
        """Return ``perplexity`` and ``sop_accuracy``, or for labels ``accuracy`` and ``f1`` (regression: ``mse``).

        Question answering: ``exact_match``, the fraction of rows whose predicted start and end are both correct.
        """
        n, heads = self.model.num_labels, self._heads
        if "lm_loss" in heads:
            return {
                **super().metrics(),
                **({"sop_accuracy": metrics.WeightedMean()} if "sop_loss" in heads else {}),
            }
        if "start_loss" in heads:
            return {"exact_match": metrics.WeightedMean()}
        if self._problem == "regression" or (self._problem is None and n == 1):
            return {"mse": MeanSquaredError()}
        if self._problem != "multi_label_classification":
            options: dict[str, Any] = {
                "task": "multiclass",
                "num_classes": n,
                "ignore_index": base.IGNORE_INDEX,
            }
            options["validate_args"] = False
            return {
                "accuracy": Accuracy(**options, average="micro"),
                "f1": F1Score(**options, average="macro"),
            }
        options = {
            "task": "multilabel" if n > 1 else "binary",
            "num_labels": n,
            "average": "macro",
        }
        return {"accuracy": Accuracy(**options), "f1": F1Score(**options)}

    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with one microbatch; targets with weight 0 do not count."""
        if "lm_loss" in self._heads:
            super().update_metrics(metrics, batch, output[0])
            if "sop_loss" in self._heads:
                metrics["sop_accuracy"].update(
                    output[1].argmax(-1) == batch["order"], batch["order_mask"] > 0
                )
        elif "start_loss" in self._heads:
            positions = output.argmax(1)
            is_correct = (positions[:, 0] == batch["start"]) & (positions[:, 1] == batch["end"])
            metrics["exact_match"].update(
                is_correct, (batch["start_mask"] > 0) & (batch["end_mask"] > 0)
            )
        else:
            self._update_label_metrics(metrics, batch, output)

    def _update_label_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Tensor,
    ) -> None:
        targets, counted = batch["targets"], batch["loss_mask"] > 0
        if self._problem == "single_label_classification":
            preds, targets = (
                output.flatten(0, -2).float(),
                targets.masked_fill(~counted, base.IGNORE_INDEX).flatten(),
            )
        elif not counted.any():
            return
        elif self._problem == "regression":
            preds, targets = output[counted].float(), targets[counted]
        else:  # not logits: torchmetrics takes logits that are all in 0..1 for probabilities
            rows = counted[:, 0]
            preds, targets = (output[rows] > 0).long(), (targets[rows] > 0.5).long()
        for metric in metrics.values():
            metric.update(preds, targets)
