"""How often does a GPT know what a text ends with? The objective of LAMBADA (Paperno et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.steps.base import Batch, LossFunc, LossTerm, Output
from lightning_megatron.steps.gpt import GPTTrainStep
from lightning_megatron.steps.metrics import Fraction
from lightning_megatron.steps.predicted_tokens import predicted_tokens


class TokenOutput(NamedTuple):
    """What the last stage knows of each token of a microbatch."""

    losses: torch.Tensor
    """[b, s], fp32: cross-entropy of the target."""
    is_predicted: torch.Tensor
    """[b, s], bool: whether no other token is more likely."""


class LastWordTrainStep(GPTTrainStep):
    """``GPTTrainStep`` that also counts the rows all of whose targets are the most likely tokens.

    A row's targets are the tokens of the last word, each predicted from the true tokens before it (batches of
    ``TextEvaluationDataModule(task="last_word")``, or any of a GPT whose ``labels`` are -100 elsewhere). Validation and
    test log ``last_word_accuracy``, right rows among those with targets, besides the loss and the perplexity of the
    targets. Of several tokens that are equally likely the first counts, as ``argmax`` finds it.

    Source: Megatron-LM core_r0.16, tasks/zeroshot_gpt/evaluate.py (task LAMBADA).
    """

    @override
    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, LossFunc]:
        """``TokenOutput`` on the last stage, whose TP ranks exchange maxima; hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(batch["tokens"], batch.get("position_ids"), batch.get("attention_mask"))
        chunk: Any = unwrap(model)
        if chunk.post_process:
            predicted = predicted_tokens(output.detach(), chunk.pg_collection.tp)
            # The loss may overwrite the logits.
            losses = chunk.compute_language_model_loss(batch["targets"], output.transpose(0, 1).contiguous())
            output = TokenOutput(losses=losses, is_predicted=predicted == batch["targets"])
        return output, partial(self.loss_func, batch)

    @override
    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        return super().loss_func(batch, output.losses)

    @override
    def metrics(self) -> dict[str, Metric]:
        """``last_word_accuracy`` of the rows and ``perplexity`` of their targets."""
        return {**super().metrics(), "last_word_accuracy": Fraction()}

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in one microbatch; a row without targets (or with the weight 0) does not count."""
        super().update_metrics(metrics, batch, output.losses)
        is_target = batch["loss_mask"] > 0
        is_right = (output.is_predicted | ~is_target).all(dim=-1)
        cast("Fraction", metrics["last_word_accuracy"]).update(is_right, counted=is_target.any(dim=-1))
