"""What do labels teach a BERT? The classes of tokens and rows, values of rows, and answers to questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torchmetrics import MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelAccuracy,
    MultilabelF1Score,
)
from typing_extensions import override

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import ModelConfig, ProblemType
from lightning_megatron.steps.base import Batch, LossTerm, Output
from lightning_megatron.steps.bert_objectives import Objective, token_labels, token_targets
from lightning_megatron.steps.checks import check_floats, check_integers, check_labels, check_rows
from lightning_megatron.steps.masks import IGNORE_INDEX


class TokenLabels(Objective):
    """The class of each token; the model's output is logits [b, s, num_labels]."""

    terms = ("label_loss",)
    needed = ("labels",)
    optional = ("loss_mask",)
    masks = ("loss_mask",)

    def __init__(self, model: ModelConfig) -> None:
        """Take the number of classes.

        Raises:
            ConfigError: If there is only one class to choose from.
        """
        self._num_labels = model.num_labels
        _check_choice(model)

    @override
    def check(self, batch: Batch) -> None:
        check_labels("labels", token_labels(batch), self._num_labels, "num_labels")

    @override
    def targets(self, batch: Batch, rows: torch.Tensor) -> Batch:
        return token_targets(batch, rows)

    @override
    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"label_loss": batch["loss_mask"].sum()}

    @override
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        losses = F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten(), reduction="none")
        total = (losses * batch["loss_mask"].flatten()).sum()
        return {"label_loss": LossTerm(total, self.counts(batch)["label_loss"])}

    @override
    def metrics(self) -> dict[str, Metric]:
        return _class_metrics(self._num_labels)

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        _score_classes(metrics, output.flatten(0, 1), batch["targets"].flatten(), batch["loss_mask"].flatten())


class RowLabels(Objective):
    """The class, the classes or the values of each row; the model's output is logits [b, num_labels]."""

    terms = ("label_loss",)
    needed = ("labels",)
    masks = ("row_mask",)
    reads_first_token = True

    def __init__(self, model: ModelConfig) -> None:
        """Take the number of classes, and the kind of problem if the config tells it.

        Raises:
            ConfigError: If there is only one class to choose from, or the kind of problem is unknown.
        """
        self._num_labels = model.num_labels
        self.problem: ProblemType | None = model.problem_type
        """Told by the config, else by the first batch, as Hugging Face does."""
        if self.problem is not None and self.problem not in get_args(ProblemType):
            raise ConfigError(
                f"problem_type={self.problem!r} is unknown; use one of {', '.join(get_args(ProblemType))}"
            )
        if self.problem == "single_label_classification":
            _check_choice(model)

    def _problem_of(self, labels: torch.Tensor) -> ProblemType:
        """Hugging Face's rule (modeling_megatron_bert.py:MegatronBertForSequenceClassification)."""
        if self.problem is not None:
            return self.problem
        if self._num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    @override
    def check(self, batch: Batch) -> None:
        labels, n = batch["labels"], self._num_labels
        rows = batch["input_ids"].shape[0]
        problem = self._problem_of(labels)
        rule = f"num_labels={n}, problem_type={problem!r}"
        if problem == "single_label_classification":
            check_integers("labels", labels, rule)
            check_rows("labels", labels, rows, 1, f"one per row: {rule}")
            check_labels("labels", labels, n, "num_labels")
            return
        check_floats("labels", labels, rule)
        check_rows("labels", labels, rows, n, rule)
        if problem == "multi_label_classification" and ((labels < 0) | (labels > 1)).any():
            wrong = labels[(labels < 0) | (labels > 1)][0].item()
            raise DataError(f"labels contain {wrong} and must be in 0..1 ({rule}); correct the data")

    @override
    def targets(self, batch: Batch, rows: torch.Tensor) -> Batch:
        labels = batch["labels"]
        self.problem = self._problem_of(labels)
        if self.problem == "single_label_classification":
            classes = labels.long().reshape(-1)
            return {"labels": classes.clamp(min=0), "row_mask": (classes >= 0) * rows}
        return {"labels": labels.float().reshape(-1, self._num_labels), "row_mask": rows}

    @override
    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        per_row = 1 if self.problem == "single_label_classification" else self._num_labels
        return {"label_loss": batch["row_mask"].sum() * per_row}

    @override
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        logits, labels = output.float(), batch["labels"]
        if self.problem == "single_label_classification":
            losses = F.cross_entropy(logits, labels, reduction="none")
        elif self.problem == "regression":
            losses = (logits - labels).square().sum(-1)
        else:
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(-1)
        return {"label_loss": LossTerm((losses * batch["row_mask"]).sum(), self.counts(batch)["label_loss"])}

    @override
    def metrics(self) -> dict[str, Metric]:
        n = self._num_labels
        if self.problem == "regression" or (self.problem is None and n == 1):
            return {"mse": MeanSquaredError()}
        if self.problem != "multi_label_classification":
            return _class_metrics(n)
        if n == 1:  # torchmetrics' multi-label metrics want two
            return {"accuracy": BinaryAccuracy(), "f1": BinaryF1Score()}
        return {"accuracy": MultilabelAccuracy(num_labels=n), "f1": MultilabelF1Score(num_labels=n)}

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        labels, mask = batch["labels"], batch["row_mask"]
        if self.problem == "single_label_classification":
            _score_classes(metrics, output, labels, mask)
            return
        counted = mask > 0
        if not counted.any():
            return
        if self.problem == "regression":
            metrics["mse"].update(output[counted].float().flatten(), labels[counted].flatten())
            return
        for metric in metrics.values():
            # Not logits: torchmetrics takes those that all lie in 0..1 for probabilities.
            metric.update((output[counted] > 0).long(), (labels[counted] > 0.5).long())


class AnswerSpan(Objective):
    """Where the answer starts and where it ends; the model's output is logits [b, s, 2].

    The softmax is over all positions, padding included, as in Hugging Face.
    """

    terms = ("start_loss", "end_loss")
    needed = ("start_positions", "end_positions")
    masks = ("start_mask", "end_mask")
    reads_padding = True

    def __init__(self, model: ModelConfig) -> None:
        """Check the head.

        Raises:
            ConfigError: If it is not two wide.
        """
        if model.num_labels != 2:
            raise ConfigError(
                f"num_labels={model.num_labels} does not fit task='question_answering', whose head has one logit for "
                "the start and one for the end; use num_labels=2"
            )

    @override
    def check(self, batch: Batch) -> None:
        rows = batch["input_ids"].shape[0]
        for name in self.needed:
            check_integers(name, batch[name], "a place in the row")
            check_rows(name, batch[name], rows, 1, "one per row")

    @override
    def targets(self, batch: Batch, rows: torch.Tensor) -> Batch:
        length = batch["input_ids"].shape[1]
        prepared = {}
        for side in ("start", "end"):
            # What lies before the row counts as its start, what lies after it is ignored: Hugging Face's rule.
            place = batch[f"{side}_positions"].long().reshape(-1).clamp(0, length)
            prepared[side] = place.clamp(max=length - 1)
            prepared[f"{side}_mask"] = (place < length) * rows
        return prepared

    @override
    def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"start_loss": batch["start_mask"].sum(), "end_loss": batch["end_mask"].sum()}

    @override
    def losses(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        terms = {}
        for column, side in enumerate(("start", "end")):
            losses = F.cross_entropy(output[..., column].float(), batch[side], reduction="none")
            total = 0.5 * (losses * batch[f"{side}_mask"]).sum()
            terms[f"{side}_loss"] = LossTerm(total, batch[f"{side}_mask"].sum())
        return terms

    @override
    def metrics(self) -> dict[str, Metric]:
        return {"exact_match": MeanMetric()}

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        places = output.argmax(1)
        right = (places[:, 0] == batch["start"]) & (places[:, 1] == batch["end"])
        counted = (batch["start_mask"] > 0) & (batch["end_mask"] > 0)
        metrics["exact_match"].update(right.float(), counted.float())


def _check_choice(model: ModelConfig) -> None:
    if model.num_labels < 2:
        raise ConfigError(
            f"num_labels={model.num_labels} leaves nothing to choose for task={model.task!r}; use num_labels=2 for two "
            "classes, or a sequence classification with problem_type='regression' for one value"
        )


def _class_metrics(num_classes: int) -> dict[str, Metric]:
    options: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORE_INDEX, "validate_args": False}
    return {
        "accuracy": MulticlassAccuracy(average="micro", **options),
        "f1": MulticlassF1Score(average="macro", **options),
    }


def _score_classes(
    metrics: Mapping[str, Metric], logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
) -> None:
    """Take in classes [n] where ``mask`` [n] is not 0; logits: [n, num_labels]."""
    for metric in metrics.values():
        metric.update(logits.float(), targets.masked_fill(mask == 0, IGNORE_INDEX))
