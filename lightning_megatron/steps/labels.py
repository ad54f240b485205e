"""Labels of classification and regression: their checks, targets, losses and metrics, for the heads of BERTs and GPTs.

What a label is follows from ``problem_type``: a class (single-label classification), one weight from 0 to 1 for each
class (multi-label classification), or one value for each output (regression).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Accuracy, F1Score, MeanSquaredError, Metric

from lightning_megatron.engine.objective import Batch
from lightning_megatron.errors import ConfigError, DataError, require_choice
from lightning_megatron.models.config import ModelConfig, ProblemType
from lightning_megatron.steps import base, batch_checks


def class_targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Classes of integer labels, int64, and whether each is a target; negative labels are none.

    Args:
        labels: [b] or [b, s].
    """
    return labels.clamp(min=0), labels >= 0


def check_classes(
    name: str,
    labels: Tensor,
    rows: int,
    length: int,
    *,
    per_token: bool,
) -> None:
    """Raise unless ``labels`` are integers, one per row or one per token.

    Args:
        name: The batch's key.
        labels: The batch's tensor.
        rows: Number of rows b.
        length: Number of tokens s of a row.
        per_token: Whether labels are per token.

    Raises:
        DataError: If the dtype or the shape is wrong.
    """
    if per_token:
        batch_checks.check_integers(name, labels, "one per token", (rows, length))
    else:
        batch_checks.check_integers(name, labels, "one per row", (rows,), (rows, 1))


class Labels:
    """Labels of a model for ``sequence_classification`` or ``token_classification``.

    Attributes:
        per_token: Whether labels are per token, not per row.
        problem: The problem type; None before the first batch, if the config does not tell.
    """

    def __init__(self, model: ModelConfig) -> None:
        """Check the model's ``num_labels`` and ``problem_type``.

        Raises:
            ConfigError: If one does not fit the task.
        """
        self.per_token = model.task == "token_classification"
        self.num_labels = model.num_labels
        self.problem: ProblemType | None = model.problem_type
        if self.per_token:
            self.problem = "single_label_classification"
        if self.problem is not None:
            require_choice("problem_type", self.problem, get_args(ProblemType))
        if self.problem == "single_label_classification" and self.num_labels < 2:
            raise ConfigError(
                f"num_labels={self.num_labels}: expected at least 2 for task={model.task!r}; use num_labels=2, or "
                "problem_type='regression' for one value"
            )

    def infer_problem(self, labels: Tensor) -> ProblemType:
        """Problem type of the config, else of ``labels``, as transformers infers it."""
        if self.problem is not None:
            return self.problem
        if self.num_labels == 1:
            return "regression"
        if labels.is_floating_point():
            return "multi_label_classification"
        return "single_label_classification"

    def check(
        self,
        labels: Tensor,
        rows: int,
        length: int,
    ) -> None:
        """Raise unless ``labels`` have the dtype, shape and range of the problem type.

        Args:
            labels: The batch's ``labels``.
            rows: Number of rows b.
            length: Number of tokens s of a row.

        Raises:
            DataError: With the value, the rule and the fix.
        """
        if self.infer_problem(labels) != "single_label_classification":
            self._check_values(labels, rows)
            return
        check_classes(
            "labels",
            labels,
            rows,
            length,
            per_token=self.per_token,
        )
        batch_checks.check_range(
            "labels",
            labels,
            self.num_labels,
            "num_labels",
            base.IGNORED_LABELS,
        )

    def _check_values(self, labels: Tensor, rows: int) -> None:
        n = self.num_labels
        problem = self.infer_problem(labels)
        rule = f"num_labels={n}, problem_type={problem!r}"
        if not labels.is_floating_point():
            raise DataError(
                f"labels is {labels.dtype} and must be a float type ({rule}); use labels.float()"
            )
        batch_checks.check_values("labels", labels, labels.isfinite(), "finite")
        shapes: list[tuple[int, ...]] = [(rows, n)]
        if n == 1:
            shapes.append((rows,))
        batch_checks.check_shape("labels", labels, rule, *shapes)
        if problem == "multi_label_classification":
            is_valid = (labels >= 0) & (labels <= 1)
            batch_checks.check_values("labels", labels, is_valid, f"in 0..1 ({rule})")

    def targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Targets of ``loss``, and whether each counts; fixes the problem type.

        Args:
            labels: The batch's ``labels``.

        Returns:
            Classes, int64, and bool, [b] or [b, s] each; or values and ones, [b, num_labels] fp32 each.
        """
        self.problem = self.infer_problem(labels)
        if self.problem != "single_label_classification":
            values = labels.float().reshape(-1, self.num_labels)
            return values, torch.ones_like(values)
        labels = labels.long()
        if not self.per_token:
            labels = labels.reshape(-1)
        return class_targets(labels)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of each target.

        Args:
            logits: [b, num_labels] or [b, s, num_labels], fp32.
            targets: As ``targets`` returns them.
        """
        if self.problem == "regression":
            return (logits - targets).square()
        if self.problem == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")

    def metrics(self) -> dict[str, Metric]:
        """Return ``accuracy`` and ``f1``; for regression ``mse``."""
        n = self.num_labels
        if self.problem == "regression" or (self.problem is None and n == 1):
            return {"mse": MeanSquaredError()}
        if self.problem != "multi_label_classification":
            options: dict[str, Any] = {
                "task": "multiclass",
                "num_classes": n,
                "ignore_index": base.IGNORE_INDEX,
                "validate_args": False,
            }
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
        logits: Tensor,
    ) -> None:
        """Update the metrics with one microbatch; targets with weight 0 do not count.

        Args:
            metrics: The metrics of ``metrics()``.
            batch: With ``targets``, and their weights ``loss_mask``.
            logits: Output of the head.
        """
        targets = batch["targets"]
        counted = batch["loss_mask"] > 0
        if self.problem == "single_label_classification":
            preds = logits.flatten(0, -2).float()
            targets = targets.masked_fill(~counted, base.IGNORE_INDEX).flatten()
        elif not counted.any():
            return
        elif self.problem == "regression":
            preds = logits[counted].float()
            targets = targets[counted]
        else:  # not logits: torchmetrics takes logits that are all in 0..1 for probabilities
            rows = counted[:, 0]
            preds = (logits[rows] > 0).long()
            targets = (targets[rows] > 0.5).long()
        for metric in metrics.values():
            metric.update(preds, targets)
