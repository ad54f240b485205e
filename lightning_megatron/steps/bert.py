"""Objectives of BERT: masked tokens and the order of sentences, and four kinds of fine-tuning.

Each target has a weight in a prepared tensor called ``..._mask``, 0 for none; sums are over weights, so any cut of a
batch into rows gives the same means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)

from lightning_megatron.engine.schedule import Batch, LossFunc, LossTerm, Output, TrainStep
from lightning_megatron.errors import ConfigError, DataError, require_choice
from lightning_megatron.models.config import ModelConfig, ProblemType
from lightning_megatron.steps import base

MEGATRON_NAMES = {
    "text": "input_ids",
    "types": "token_type_ids",
    "padding_mask": "attention_mask",
    "is_random": "next_sentence_label",
}
"""What Megatron's indexed samples call what Hugging Face calls otherwise."""

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "sample_mask")


class BertTrainStep(TrainStep):
    """The objective of a BERT's task, each term a mean over its targets in the global batch.

    Inputs are Hugging Face's, [b, s] each: ``input_ids`` and, optionally, ``attention_mask`` (1 for tokens and 0 for
    padding; or numbers of segments that do not see each other), ``token_type_ids``, ``position_ids``; or Megatron's
    ``text``, ``padding_mask``, ``types``. Any batch may carry ``sample_mask`` [b]: the loss of a row counts this much.

    ==========================  =======================================================================================
    ``pretraining``             ``lm_loss`` of ``labels`` [b, s] and ``sop_loss`` of ``next_sentence_label`` (or
                                ``is_random``) [b]
    ``masked_lm``               ``lm_loss`` of ``labels`` [b, s]
    ``sequence_classification``  ``label_loss`` of ``labels``: float [b] or [b, n] regression, int [b] classes, float
                                [b, n] several labels at once
    ``token_classification``    ``label_loss`` of ``labels`` [b, s]
    ``question_answering``      ``start_loss`` and ``end_loss`` of ``start_positions`` and ``end_positions`` [b], half
                                of the cross-entropies, so that their sum is Hugging Face's loss
    ==========================  =======================================================================================

    Labels of -100 (and -1, Megatron's) are no targets; ``loss_mask`` [b, s] weighs those of tokens.
    """

    objective: _Objective
    """Of the model's task, from ``bind`` on."""

    def __init__(self, binary_head: bool = True) -> None:
        """Choose what pretraining learns.

        Args:
            binary_head: Whether pretraining learns the order of sentences too; other tasks do not look at it.
        """
        self.binary_head = binary_head

    def bind(self, model: ModelConfig) -> None:
        """Choose the objective by the model's task.

        Raises:
            ConfigError: If the model is no BERT, or its head has another width than its task needs.
        """
        base.check_trains(self, "bert", model)
        super().bind(model)
        if model.task == "sequence_classification":
            self.objective = _RowLabels(model, model.problem_type)
        elif model.task == "token_classification":
            self.objective = _TokenLabels(model, "single_label_classification")
        elif model.task == "question_answering":
            self.objective = _AnswerSpan(model)
        else:
            self.objective = _MaskedTokens(model, self.binary_head)
        self.loss_terms = self.objective.terms  # type: ignore[misc]

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and numbers out of range; drop a mask that hides nothing.

        Attention without a mask is faster, and on the host it costs nothing to see that there is none. A subclass that
        prepares batches in its own way is expected to have keys of its own, which are not looked at.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if base.has_own_batches(self, BertTrainStep):
            return
        named = self._named(batch)
        tokens = named["input_ids"]
        base.check_tokens("input_ids", tokens, self.model)
        base.check_beside_tokens(named, tokens.shape[0], tokens.shape[1], self.model)
        self._check_first_tokens(named)
        self.objective.check(named)
        if "attention_mask" in named and bool((named["attention_mask"] == 1).all()):
            del batch["attention_mask" if "attention_mask" in batch else "padding_mask"]

    def _check_first_tokens(self, named: Batch) -> None:
        if not self.objective.reads_first_token or "attention_mask" not in named:
            return
        counted = named["sample_mask"] != 0 if "sample_mask" in named else True
        padded = (named["attention_mask"][:, 0] == 0) & counted
        if padded.any():
            raise DataError(
                f"attention_mask[{int(padded.nonzero()[0])}, 0] is 0, and the head reads that token; pad on the right"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens`` [b, s] int64, the user's mask, token types and positions, and the targets with their masks.

        Raises:
            DataError: If there are keys that it does not understand.
        """
        named = self._named(batch)
        tokens = named["input_ids"].long()
        rows = named.get("sample_mask", tokens.new_ones(tokens.shape[0])).float()
        inputs: Batch = {n: named[n].long() for n in ("attention_mask", "token_type_ids", "position_ids") if n in named}
        return {"tokens": tokens, **inputs, **self.objective.targets(named, rows)}

    def _named(self, batch: Batch) -> Batch:
        """The batch by Hugging Face's names."""
        needed = dict.fromkeys(("input_ids", *self.objective.needed), "")
        if "next_sentence_label" in needed:
            needed["next_sentence_label"] = ", or use BertTrainStep(binary_head=False)"
        known = {*_INPUTS, *needed, *self.objective.optional}
        return base.by_known_names(batch, known, needed, f"BertTrainStep for task {self.model.task!r}", MEGATRON_NAMES)

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row without targets."""
        return base.without_last_rows(batch, num_rows, self.objective.masks)

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row."""
        return batch["tokens"].shape[1]

    def counts(self, batch: Batch) -> Mapping[str, Tensor]:
        """The number of targets of each term, known from the masks alone."""
        return self.objective.counts(batch)

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, LossFunc]:
        """What ``BertChunk.forward`` returns: losses or logits on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        mask = batch.get("attention_mask")
        if mask is not None and self.objective.reads_padding:
            # Segments let padding see padding. Hugging Face lets it see the tokens, and here its logits count.
            mask = (mask == 0)[:, None, None, :]
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            mask,
            batch.get("token_type_ids"),
            labels=self.objective.model_labels(batch),
        )
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """The terms of the class's table.

        Args:
            batch: The prepared microbatch.
            output: What ``BertChunk.forward`` returned.
        """
        return self.objective.losses(batch, output)

    def metrics(self) -> dict[str, Metric]:
        """Masked tokens: ``perplexity`` and ``sop_accuracy``; labels: ``accuracy`` and ``f1`` (regression: ``mse``).

        For questions ``exact_match``: how often both the start and the end are right.
        """
        return self.objective.metrics()

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in the targets of one microbatch; what carries no loss does not count."""
        self.objective.update_metrics(metrics, batch, output)


# ---- what the labels of a task mean ---------------------------------------------------------------------------------


class _Objective(ABC):
    """What a task's labels mean; ``BertTrainStep`` does the rest."""

    terms: tuple[str, ...] = ("label_loss",)
    """Names of the loss terms."""
    needed: tuple[str, ...] = ("labels",)
    """Keys that a batch must have."""
    optional: tuple[str, ...] = ()
    """Keys that it may have."""
    masks: tuple[str, ...] = ("loss_mask",)
    """Prepared tensors with the weights of each term's targets."""
    reads_padding = False
    """Whether logits at padding are used."""
    reads_first_token = False
    """Whether the head reads the first token of each row."""

    @abstractmethod
    def check(self, batch: Batch) -> None:
        """Refuse labels of a wrong kind; ``batch`` has Hugging Face's names and checked inputs."""

    @abstractmethod
    def targets(self, batch: Batch, rows: Tensor) -> Batch:
        """The prepared targets and their masks; ``rows`` [b], fp32, is the weight of each row."""

    def model_labels(self, batch: Batch) -> Tensor | None:
        """The labels of which the model itself returns the losses, [b, s]; None to have its logits."""
        del batch
        return None

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Each term's number of targets in a prepared batch."""
        return {term: batch[mask].sum() for term, mask in zip(self.terms, self.masks, strict=True)}

    @abstractmethod
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """Each term of a prepared microbatch."""

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """New metrics."""

    @abstractmethod
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in one prepared microbatch."""


class _MaskedTokens(_Objective):
    """Which tokens stood where they were masked, and (pretraining) whether two sentences are in order.

    The model's output is the pair of the tokens' losses [b, s] and the order's logits [b, 2].
    """

    def __init__(self, model: ModelConfig, learns_order: bool) -> None:
        self._vocab_size = model.vocab_size
        self._has_order = model.task == "pretraining"
        self._learns_order = self.reads_first_token = self._has_order and learns_order
        self.terms, self.optional = ("lm_loss",), ("loss_mask", "truncated", "next_sentence_label")
        if self._learns_order:
            self.terms, self.masks = ("lm_loss", "sop_loss"), ("loss_mask", "order_mask")
            self.needed = ("labels", "next_sentence_label")

    def check(self, batch: Batch) -> None:
        _check_token_labels(batch)
        labels = batch["labels"]
        counted = labels if "loss_mask" not in batch else labels.masked_fill(batch["loss_mask"] == 0, base.IGNORE_INDEX)
        base.check_numbers("labels", counted, self._vocab_size, "vocab_size", base.IGNORED_LABELS)
        if self._learns_order:
            order = batch["next_sentence_label"]
            base.check_integers("next_sentence_label", order, "one per row", *_one_per_row(labels))
            base.check_numbers("next_sentence_label", order, 2, "kinds of order", base.IGNORED_LABELS)

    def targets(self, batch: Batch, rows: Tensor) -> Batch:
        prepared = _token_targets(batch)
        if self._learns_order:
            order = batch["next_sentence_label"].long().reshape(-1)
            prepared |= {"order": order.clamp(min=0), "order_mask": (order >= 0) * rows}
        return prepared

    def model_labels(self, batch: Batch) -> Tensor | None:
        return batch["targets"]

    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        losses, order_logits = output
        terms = {"lm_loss": base.masked_term(losses, batch["loss_mask"])}
        if self._learns_order:
            order = F.cross_entropy(order_logits.float(), batch["order"], reduction="none")
            terms["sop_loss"] = base.masked_term(order, batch["order_mask"])
        elif self._has_order:
            # Its weights must have a gradient, if only zero: the engine waits for that of every weight.
            unused = 0.0 * order_logits.float().sum()
            terms["lm_loss"] = terms["lm_loss"]._replace(sum=terms["lm_loss"].sum + unused)
        return terms

    def metrics(self) -> dict[str, Metric]:
        order: dict[str, Metric] = {"sop_accuracy": base.WeightedMean()} if self._learns_order else {}
        return {"perplexity": base.Perplexity(), **order}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        losses, order_logits = output
        metrics["perplexity"].update(losses, batch["loss_mask"])
        if self._learns_order:
            metrics["sop_accuracy"].update(order_logits.argmax(-1) == batch["order"], batch["order_mask"] > 0)


class _RowLabels(_Objective):
    """The class, the classes or the values of each row; the model's output is logits [b, num_labels]."""

    reads_first_token = True

    def __init__(self, model: ModelConfig, problem: ProblemType | None) -> None:
        self._num_labels = model.num_labels
        self.problem = problem
        """Told by the config, else by the first batch, as Hugging Face does."""
        if problem is not None:
            require_choice("problem_type", problem, get_args(ProblemType))
        if problem == "single_label_classification" and model.num_labels < 2:
            raise ConfigError(
                f"num_labels={model.num_labels} leaves nothing to choose for task={model.task!r}; use num_labels=2, or "
                "problem_type='regression' for one value"
            )

    def _problem_of(self, labels: Tensor) -> ProblemType:
        """Hugging Face's rule (modeling_megatron_bert.py:MegatronBertForSequenceClassification)."""
        if self.problem is not None:
            return self.problem
        if self._num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def check(self, batch: Batch) -> None:
        labels, n = batch["labels"], self._num_labels
        rows = batch["input_ids"].shape[0]
        problem = self._problem_of(labels)
        rule = f"num_labels={n}, problem_type={problem!r}"
        if problem == "single_label_classification":
            base.check_integers("labels", labels, rule, *_one_per_row(batch["input_ids"]))
            base.check_numbers("labels", labels, n, "num_labels", base.IGNORED_LABELS)
            return
        base.check_floats("labels", labels, rule)
        base.check_shape("labels", labels, rule, (rows, n), *([(rows,)] if n == 1 else []))
        if problem == "multi_label_classification":
            base.check_all("labels", labels, (labels >= 0) & (labels <= 1), f"in 0..1 ({rule})")

    def targets(self, batch: Batch, rows: Tensor) -> Batch:
        labels = batch["labels"]
        self.problem = self._problem_of(labels)
        if self.problem == "single_label_classification":
            classes = labels.long().reshape(-1)
            return {"targets": classes.clamp(min=0), "loss_mask": (classes >= 0) * rows}
        targets = labels.float().reshape(-1, self._num_labels)
        return {"targets": targets, "loss_mask": rows[:, None].expand_as(targets).clone()}

    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        logits, targets = output.float(), batch["targets"]
        if self.problem == "single_label_classification":
            losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        elif self.problem == "regression":
            losses = (logits - targets).square()
        else:
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return {"label_loss": base.masked_term(losses, batch["loss_mask"])}

    def metrics(self) -> dict[str, Metric]:
        n = self._num_labels
        if self.problem == "regression" or (self.problem is None and n == 1):
            return {"mse": MeanSquaredError()}
        if self.problem != "multi_label_classification":
            options: dict[str, Any] = {"num_classes": n, "ignore_index": base.IGNORE_INDEX, "validate_args": False}
            f1 = MulticlassF1Score(average="macro", **options)
            return {"accuracy": MulticlassAccuracy(average="micro", **options), "f1": f1}
        if n == 1:  # torchmetrics' multi-label metrics want two
            return {"accuracy": BinaryAccuracy(), "f1": BinaryF1Score()}
        return {"accuracy": MultilabelAccuracy(num_labels=n), "f1": MultilabelF1Score(num_labels=n)}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        targets, counted = batch["targets"], batch["loss_mask"] > 0
        is_one = self.problem == "single_label_classification"
        for metric in metrics.values() if is_one or counted.any() else ():
            if is_one:
                classes = targets.masked_fill(~counted, base.IGNORE_INDEX)
                metric.update(output.flatten(0, -2).float(), classes.flatten())
            elif self.problem == "regression":
                metric.update(output[counted].float(), targets[counted])
            else:  # not logits: torchmetrics takes those that all lie in 0..1 for probabilities
                rows = counted[:, 0]
                metric.update((output[rows] > 0).long(), (targets[rows] > 0.5).long())


class _TokenLabels(_RowLabels):
    """The class of each token; the model's output is logits [b, s, num_labels]."""

    optional = ("loss_mask",)
    reads_first_token = False

    def check(self, batch: Batch) -> None:
        _check_token_labels(batch)
        base.check_numbers("labels", batch["labels"], self._num_labels, "num_labels", base.IGNORED_LABELS)

    def targets(self, batch: Batch, rows: Tensor) -> Batch:
        return _token_targets(batch)


class _AnswerSpan(_Objective):
    """Where the answer starts and where it ends; the model's output is logits [b, s, 2].

    The softmax is over all positions, padding included, as in Hugging Face.
    """

    terms = ("start_loss", "end_loss")
    needed = ("start_positions", "end_positions")
    masks = ("start_mask", "end_mask")
    reads_padding = True

    def __init__(self, model: ModelConfig) -> None:
        if model.num_labels != 2:
            raise ConfigError(f"num_labels={model.num_labels} for task='question_answering'; use num_labels=2")

    def check(self, batch: Batch) -> None:
        for name in self.needed:
            base.check_integers(name, batch[name], "a place in each row", *_one_per_row(batch["input_ids"]))

    def targets(self, batch: Batch, rows: Tensor) -> Batch:
        length = batch["input_ids"].shape[1]
        prepared = {}
        for side in ("start", "end"):
            # What lies before the row counts as its start, what lies after it is ignored: Hugging Face's rule.
            place = batch[f"{side}_positions"].long().reshape(-1).clamp(0, length)
            prepared[side] = place.clamp(max=length - 1)
            prepared[f"{side}_mask"] = (place < length) * rows
        return prepared

    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        terms = {}
        for column, side in enumerate(("start", "end")):
            losses = F.cross_entropy(output[..., column].float(), batch[side], reduction="none")
            terms[f"{side}_loss"] = base.masked_term(0.5 * losses, batch[f"{side}_mask"])
        return terms

    def metrics(self) -> dict[str, Metric]:
        return {"exact_match": base.WeightedMean()}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        places = output.argmax(1)
        right = (places[:, 0] == batch["start"]) & (places[:, 1] == batch["end"])
        counted = (batch["start_mask"] > 0) & (batch["end_mask"] > 0)
        metrics["exact_match"].update(right, counted)


def _one_per_row(batch: Tensor) -> tuple[tuple[int, ...], ...]:
    """The shapes of one number for each row of ``batch``."""
    return (len(batch),), (len(batch), 1)


def _check_token_labels(batch: Batch) -> None:
    rule = "one token or class at each place, as input_ids"
    base.check_integers("labels", batch["labels"], rule, tuple(batch["input_ids"].shape))


def _token_targets(batch: Batch) -> Batch:
    """``targets`` [b, s] and their weights ``loss_mask`` [b, s], fp32."""
    labels = batch["labels"].long()
    return {"targets": labels.clamp(min=0), "loss_mask": base.weighted(labels >= 0, batch)}
