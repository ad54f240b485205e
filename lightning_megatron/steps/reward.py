"""Train step of reward models: the answer that people preferred gets the larger reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.objective import Batch, LossFunc, LossTerm, Output
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.metrics import WeightedMean
from lightning_megatron.steps.pairs import (
    MASKS,
    TOKENS,
    PairStep,
    check_sequences,
    check_weights,
    model_inputs,
    prepared_sequences,
)


class RewardTrainStep(PairStep):
    """Pairwise loss of a reward model (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1).

    The loss of a pair is ``-log sigmoid(r_chosen - r_rejected)``, averaged over the pairs of the global batch. A reward
    is the logit of a GPT with ``task="sequence_classification"`` and one label, read at the last token that is not
    padding. Validation and test log ``accuracy``, the fraction of pairs whose chosen sequence has the larger reward,
    and ``margin``, the mean difference of the rewards.

    Batches have ``chosen_input_ids`` and ``rejected_input_ids``, [b, s] each, of the same or of different lengths (the
    shorter ones are padded on the right), and, optionally, ``chosen_attention_mask`` and ``rejected_attention_mask`` (1
    for tokens and 0 for padding), and ``sample_mask`` [b], weights of the pairs. A row is a pair: ``micro_batch_size``
    pairs are ``2 * micro_batch_size`` sequences in one forward pass.
    """

    loss_terms = ("reward_loss",)
    masks = {"reward_loss": "loss_mask"}

    @override
    def bind(self, model: ModelConfig) -> None:
        """Set the model to train.

        Raises:
            ConfigError: If the model is no GPT with a head for one value of each row.
        """
        super().bind(model)
        problem = model.problem_type or "regression"
        is_reward = (
            model.task == "sequence_classification"
            and model.num_labels == 1
            and problem == "regression"
        )
        if not is_reward:
            raise ConfigError(
                "train_step='reward': expected task='sequence_classification' and num_labels=1, got "
                f"task={model.task!r}, num_labels={model.num_labels}, problem_type={model.problem_type!r}; set them"
            )

    @override
    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes, values out of range and sequences without tokens.

        Batches of a subclass with its own ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not RewardTrainStep.prepare_batch:
            return
        self._check_keys(batch)
        sample_mask = check_weights(batch)
        for answer, name in enumerate(MASKS):
            check_sequences(batch, answer, self.model)
            if name in batch:
                batch_checks.check_rows_have_tokens(name, batch[name], sample_mask)

    def _check_keys(self, batch: Batch) -> None:
        required = dict.fromkeys(TOKENS, "")
        known = {*TOKENS, *MASKS, "sample_mask"}
        batch_checks.rename_keys(batch, known, required, type(self).__name__)

    @override
    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``tokens`` and ``attention_mask`` [b, 2, s] int64, the chosen sequence first, and ``loss_mask`` [b].

        Without masks, and if all sequences have one length, there is no ``attention_mask``.

        Raises:
            DataError: If a key is unknown or missing.
        """
        self._check_keys(batch)
        return prepared_sequences(batch)

    @override
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run a microbatch: rewards [2 b, 1] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        return model(*model_inputs(batch)), partial(self.loss_func, batch)

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        """Return the weighted sum of the losses of the pairs.

        Args:
            batch: The prepared microbatch.
            output: Rewards, [2 b, 1].
        """
        losses = -F.logsigmoid(_margins(output))
        return {"reward_loss": base.loss_term(losses, batch["loss_mask"])}

    @override
    def metrics(self) -> dict[str, Metric]:
        """Return ``accuracy`` and ``margin``."""
        return {"accuracy": WeightedMean(), "margin": WeightedMean()}

    @override
    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with one microbatch; pairs with weight 0 do not count."""
        margins = _margins(output)
        metrics["accuracy"].update(margins > 0, batch["loss_mask"])
        metrics["margin"].update(margins, batch["loss_mask"])


def _margins(rewards: Tensor) -> Tensor:
    """Reward of the chosen sequence minus that of the rejected one: [2 b, 1] -> [b], fp32."""
    chosen, rejected = rewards.float().view(-1, 2).unbind(dim=1)
    return chosen - rejected
