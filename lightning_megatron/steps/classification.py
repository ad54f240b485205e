"""Train step of GPTs with a classification head: classes or values of rows, or classes of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.objective import Batch, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import CLASSIFICATION, ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.base import MaskedLossStep
from lightning_megatron.steps.labels import Labels

_INPUTS = ("attention_mask", "position_ids")
"""Inputs of the model other than the tokens."""


class ClassificationTrainStep(MaskedLossStep):
    """Loss of a GPT's labels, averaged over the targets of the global batch; ``train_step="gpt"`` for these tasks.

    Batches have Hugging Face's keys: ``input_ids`` [b, s], ``labels`` and, optionally, ``attention_mask`` (1 for tokens
    and 0 for padding, on either side; or numbers of segments that do not attend to each other), ``position_ids`` (as
    for ``GPTTrainStep``), and ``sample_mask`` [b], weights of the rows.

    ==========================  =======================================================================================
    ``sequence_classification``  ``labels``: float [b] or [b, n] regression, int [b] single-label, float [b, n]
                                multi-label classification. The head reads the last token of each row that is not
                                padding by ``attention_mask``. transformers takes the last one that is not
                                ``pad_token_id``: the same, if padding is that token and rows do not end with it
    ``token_classification``    ``labels`` [b, s]; ``loss_mask`` [b, s] has weights of them
    ==========================  =======================================================================================

    Which of the three, ``problem_type`` of the model's config says, or else the first batch: one label is regression,
    float labels are multi-label. Classes of -100 (and -1) are ignored.
    """

    architecture = "gpt"
    loss_terms = ("label_loss",)
    masks = {"label_loss": "loss_mask"}

    @override
    def bind(self, model: ModelConfig) -> None:
        """Set the model to train.

        Raises:
            ConfigError: If the model is no GPT with such a head, or ``num_labels`` or ``problem_type`` do not fit it.
        """
        super().bind(model)
        if model.task not in CLASSIFICATION:
            raise ConfigError(
                f"{type(self).__name__} trains heads for {' or '.join(CLASSIFICATION)}, and this {model.family} has "
                f"task={model.task!r}; give MegatronModule(task=...)"
            )
        self._labels = Labels(model)

    @override
    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes, values out of range and rows without tokens; drop inputs without effect.

        Batches of a subclass with its own ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not ClassificationTrainStep.prepare_batch:
            return
        self._check_keys(batch)
        batch_checks.check_tokens("input_ids", batch["input_ids"], self.model)
        rows, length = batch["input_ids"].shape
        batch_checks.check_token_inputs(batch, rows, length, self.model)
        self._labels.check(batch["labels"], rows, length)
        if self._labels.per_token:
            batch_checks.warn_of_padding_that_predicts(batch, batch["labels"] >= 0)
        elif "attention_mask" in batch:
            mask = batch["attention_mask"]
            batch_checks.check_rows_have_tokens("attention_mask", mask, batch.get("sample_mask"))
        batch_checks.drop_without_effect(batch)

    def _check_keys(self, batch: Batch) -> None:
        required = {"input_ids": "", "labels": ""}
        known = {*_INPUTS, *required, "sample_mask"}
        if self._labels.per_token:
            known.add("loss_mask")
        user = f"{type(self).__name__} for task {self.model.task!r}"
        batch_checks.rename_keys(batch, known, required, user)

    @override
    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``tokens`` [b, s] int64, mask and positions if any, and ``targets`` with their ``loss_mask``.

        Raises:
            DataError: If a key is unknown or missing.
        """
        self._check_keys(batch)
        inputs = {name: batch[name].long() for name in _INPUTS if name in batch}
        prepared = {"tokens": batch["input_ids"].long()}
        prepared.update(base.packed_segments(inputs, self.model))
        targets, counted = self._labels.targets(batch["labels"])
        prepared["targets"] = targets
        prepared["loss_mask"] = base.target_weights(counted, batch)
        return prepared

    @override
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run a microbatch: logits [b, n] or [b, s, n] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
        )
        return output, partial(self.loss_func, batch)

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sum of the losses of the labels.

        Args:
            batch: The prepared microbatch.
            output: Logits, [b, n] or [b, s, n].
        """
        losses = self._labels.losses(output.float(), batch["targets"])
        return {"label_loss": base.loss_term(losses, batch["loss_mask"])}

    @override
    def metrics(self) -> dict[str, Metric]:
        """Return ``accuracy`` and ``f1``; for regression ``mse``."""
        return self._labels.metrics()

    @override
    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with one microbatch; targets with weight 0 do not count."""
        self._labels.update_metrics(metrics, batch, output)
