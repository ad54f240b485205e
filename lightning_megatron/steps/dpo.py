"""Train step of direct preference optimization (DPO): the chosen answer becomes more likely than the rejected one.

Both answers of a pair are sequences of one microbatch. The model's per-token losses are negative log-probabilities, so
the loss needs no logits, and costs no communication beyond that of language modeling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.objective import Batch, FrozenPass, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError, DataError, require_choice, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.lora import adapters_off
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.gpt import shift_labels
from lightning_megatron.steps.pairs import (
    ANSWERS,
    MASKS,
    TOKENS,
    PairStep,
    check_sequences,
    check_weights,
    model_inputs,
    prepared_sequences,
    stack_pairs,
)

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]
"""Loss of a pair as a function of its margin."""

_LABELS = tuple(f"{answer}_labels" for answer in ANSWERS)
_REFERENCES = tuple(f"reference_{answer}_logps" for answer in ANSWERS)


class PreferencePairs(PairStep):
    """Batches of pairs of answers, and the log-probability of each answer under a GPT.

    The base of ``DPOTrainStep``, and what computes the log-probabilities of a reference model.
    """

    needs_references = False
    """Whether batches need the reference's log-probabilities."""

    @override
    def bind(self, model: ModelConfig) -> None:
        """Set the model to train.

        Raises:
            ConfigError: If the model is no GPT with a language modeling head.
        """
        if model.architecture != "gpt" or not model.has_output_layer:
            raise ConfigError(
                f"{type(self).__name__}: expected a GPT that is a language model, got a {model.family} with "
                f"task={model.task!r}; use a causal language model"
            )
        super().bind(model)

    @override
    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes, values out of range, and answers without a target.

        Batches of a subclass with its own ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not PreferencePairs.prepare_batch:
            return
        self._check_keys(batch)
        sample_mask = check_weights(batch)
        for answer, name in enumerate(_LABELS):
            rows, length = check_sequences(batch, answer, self.model)
            self._check_labels(name, batch[name], rows, length)
            _check_targets(name, batch[name], sample_mask)
        for name in _REFERENCES:
            if name in batch:
                values = batch[name]
                batch_checks.check_shape(name, values, "one sum per pair", (len(batch[TOKENS[0]]),))
                batch_checks.check_values(name, values, values.isfinite(), "finite")

    def _check_labels(
        self,
        name: str,
        labels: Tensor,
        rows: int,
        length: int,
    ) -> None:
        rule = "each token's label at its own position"
        batch_checks.check_integers(name, labels, rule, (rows, length))
        batch_checks.check_range(
            name,
            labels,
            self.model.vocab_size,
            "vocab_size",
            (base.IGNORE_INDEX,),
        )

    def _check_keys(self, batch: Batch) -> None:
        required = dict.fromkeys((*TOKENS, *_LABELS), "")
        known = {*TOKENS, *MASKS, *_LABELS, *_REFERENCES, "sample_mask"}
        batch_checks.rename_keys(batch, known, required, type(self).__name__)
        given = [name for name in _REFERENCES if name in batch]
        if len(given) == 1:
            raise DataError(
                f"batch: expected both of {' and '.join(_REFERENCES)}, got {given[0]} alone; give both, or none"
            )
        if not given and self.needs_references:
            raise DataError(
                f"batch: expected {' and '.join(_REFERENCES)}, got neither, and without lora the trained model has no "
                "reference in it; use PreferenceDataModule, which computes them before training, or add them"
            )

    @override
    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the pairs, the chosen sequence first.

        ``tokens`` and ``targets`` [b, 2, s] int64; ``target_mask`` [b, 2, s] fp32, 1 for positions that predict a token
        of the answer; ``loss_mask`` [b], weights of the pairs; ``reference_logps`` [b, 2] fp32 if known;
        ``attention_mask`` [b, 2, s] int64 unless all sequences have one length and no mask.

        Raises:
            DataError: If a key is unknown or missing.
        """
        self._check_keys(batch)
        targets = [shift_labels(batch[name].long()) for name in _LABELS]
        stacked = stack_pairs(targets, base.IGNORE_INDEX)
        prepared = {
            **prepared_sequences(batch),
            "targets": stacked.clamp(min=0),
            # All negative labels are ignored, as labels may not have been checked.
            "target_mask": (stacked >= 0).float(),
        }
        if _REFERENCES[0] in batch:
            references = [batch[name].float() for name in _REFERENCES]
            prepared["reference_logps"] = torch.stack(references, dim=1)
        return prepared

    def run_model(self, batch: Batch, model: torch.nn.Module) -> Output:
        """Run a microbatch: per-token losses [2 b, s] fp32 on the last stage, hidden states before it."""
        return model(*model_inputs(batch), labels=batch["targets"].flatten(0, 1))

    @override
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run a microbatch: per-token losses [2 b, s] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        return self.run_model(batch, model), partial(self.loss_func, batch)

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sum of the negative log-probabilities of the pairs' answers.

        Args:
            batch: The prepared microbatch.
            output: Per-token losses, [2 b, s].
        """
        losses = -answer_logps(batch, output).sum(dim=1)
        return {name: base.loss_term(losses, batch["loss_mask"]) for name in self.loss_terms}

    @override
    def metrics(self) -> dict[str, Metric]:
        """Return no metrics: all values are logged as terms."""
        return {}

    @override
    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update no metrics."""


@checks_options
class DPOTrainStep(PreferencePairs):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7) and two of its variants.

    The margin of a pair is ``log p(chosen) - log p(rejected)`` under the trained model minus the same under a reference
    model, the frozen model that training began with. The loss of a pair, averaged over the pairs of the global batch:

    * ``sigmoid``: ``-log sigmoid(beta * margin)``; with ``label_smoothing`` as if that share of the pairs were swapped.
    * ``ipo``: ``(margin - 1 / (2 beta))^2`` (Azar et al. 2023, arXiv 2310.12036).
    * ``hinge``: ``max(0, 1 - beta * margin)`` (Zhao et al. 2023, arXiv 2305.10425).

    Besides the loss, training, validation and test log the implicit rewards ``beta * (log p - reference log p)``, as
    ``rewards_chosen`` and ``rewards_rejected``, their difference ``margin``, and ``accuracy``, the fraction of pairs
    whose chosen answer has the larger reward.

    Batches have ``chosen_input_ids``, ``chosen_labels`` and, optionally, ``chosen_attention_mask`` (1 for tokens and 0
    for padding), [b, s] each, and the same for ``rejected_``, of the same or of another length (the shorter ones are
    padded on the right); optionally ``sample_mask`` [b], weights of the pairs. Labels are Hugging Face's: each at the
    position of its own token, -100 outside of the answer, and shifted by this step. A row is a pair:
    ``micro_batch_size`` pairs are ``2 * micro_batch_size`` sequences in one forward pass.

    ``reference_chosen_logps`` and ``reference_rejected_logps`` [b] are the sums of the log-probabilities of the tokens
    of the answers under the reference model; ``PreferenceDataModule`` computes them. Where a batch has none, the
    reference is the model with its adapters off, in a forward pass of its own before each step; without LoRA the batch
    is refused.

    Args:
        beta: Strength of the preference for the reference: the smaller, the further the model may move from it.
        loss: Loss of a pair: ``sigmoid``, ``ipo`` or ``hinge``.
        label_smoothing: For ``sigmoid``: probability that the label of a pair is wrong, below 0.5.
        average_log_probs: Divide the log-probability of each answer by its number of tokens.
    """

    loss_terms = ("dpo_loss",)
    masks = {"dpo_loss": "loss_mask"}
    logged_terms = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")

    def __init__(
        self,
        beta: float = 0.1,
        loss: PreferenceLoss = "sigmoid",
        label_smoothing: float = 0.0,
        average_log_probs: bool = False,
    ) -> None:
        """Set the options.

        Raises:
            ConfigError: If one is out of range, or does not apply to the loss.
        """
        require_number("beta", beta)
        if beta == 0:
            raise ConfigError(f"beta={beta}: expected a positive number; use e.g. 0.1")
        require_choice("loss", loss, get_args(PreferenceLoss))
        require_number("label_smoothing", label_smoothing)
        if label_smoothing >= 0.5:
            raise ConfigError(
                f"label_smoothing={label_smoothing}: expected less than 0.5, where labels say nothing; lower it"
            )
        if label_smoothing and loss != "sigmoid":
            raise ConfigError(
                f"label_smoothing={label_smoothing}: expected loss='sigmoid', got {loss!r}; leave one of them out"
            )
        self.beta = beta
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.average_log_probs = average_log_probs

    @override
    def bind(self, model: ModelConfig) -> None:
        super().bind(model)
        self.needs_references = model.lora is None

    @override
    def frozen_pass(self, batch: Batch) -> FrozenPass | None:
        """Return the pass of the model with its adapters off, if the batch has no references."""
        if "reference_logps" in batch:
            return None
        return FrozenPass(
            forward=self.run_model,
            results=_references,
            context=adapters_off,
        )

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sum of the losses of the pairs, and those of rewards, margins and accuracy.

        Args:
            batch: The prepared microbatch.
            output: Per-token losses, [2 b, s].
        """
        ratios = answer_logps(batch, output) - batch["reference_logps"]
        if self.average_log_probs:
            ratios = ratios / batch["target_mask"].sum(dim=-1).clamp(min=1.0)
        chosen, rejected = ratios.unbind(dim=1)
        margins = chosen - rejected
        values = {
            "dpo_loss": self.pair_losses(margins),
            "rewards_chosen": self.beta * chosen,
            "rewards_rejected": self.beta * rejected,
            "margin": self.beta * margins,
            "accuracy": margins > 0,
        }
        weights = batch["loss_mask"]
        return {name: base.loss_term(value, weights) for name, value in values.items()}

    def pair_losses(self, margins: Tensor) -> Tensor:
        """Loss of each pair: [b] -> [b], fp32."""
        if self.loss == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        scaled = self.beta * margins
        if self.loss == "hinge":
            return F.relu(1 - scaled)
        right = -F.logsigmoid(scaled)
        if self.label_smoothing == 0:
            return right
        wrong = -F.logsigmoid(-scaled)
        return (1 - self.label_smoothing) * right + self.label_smoothing * wrong


def answer_logps(batch: Batch, losses: Tensor) -> Tensor:
    """Sum of the log-probabilities of each answer's tokens: [b, 2], fp32, the chosen answer first.

    Args:
        batch: The prepared microbatch.
        losses: Per-token losses, [2 b, s].
    """
    mask = batch["target_mask"]
    return -(losses.float().view_as(mask) * mask).sum(dim=-1)


def _references(batch: Batch, output: Any) -> Batch:
    return {"reference_logps": answer_logps(batch, output)}


def _check_targets(name: str, labels: Tensor, sample_mask: Tensor | None) -> None:
    """Raise if an answer of a pair that counts has no target.

    Args:
        name: The batch's key of the labels.
        labels: [b, s]; the first one of a row is predicted by nothing.
        sample_mask: [b], 0 for pairs that do not count; None if all count.

    Raises:
        DataError: With the first such row.
    """
    is_empty = (labels[:, 1:] < 0).all(dim=1)
    if sample_mask is not None:
        is_empty &= sample_mask != 0
    if is_empty.any():
        raise DataError(
            f"{name}[{int(is_empty.nonzero()[0])}]: expected the tokens of an answer after the first position, got "
            "-100 alone; leave out pairs without an answer"
        )
