"""Train steps of GPT: causal language modeling, LAMBADA's last-word accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.objective import Batch, LossFunc, LossTerm, Output
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.base import MaskedLossStep
from lightning_megatron.steps.metrics import WeightedMean, vocab_parallel_argmax

_KNOWN_KEYS = {
    "text",
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "sample_mask",
    "loss_mask",
}


@checks_options
class GPTTrainStep(MaskedLossStep):
    """Cross-entropy of the next token, averaged over the targets of the global batch.

    Accepts two kinds of batches, [b, s] each:

    * Hugging Face's: ``input_ids`` and, optionally, ``labels`` (not shifted, -100 ignored; by default all tokens that
      are not padding by ``attention_mask``), ``attention_mask`` (1 for tokens and 0 for padding; or numbers of segments
      that do not attend to each other), ``position_ids`` (without a mask, each text of a packed row begins where they
      do not count on, as in transformers; a mask of ones says that it does not).
    * Megatron's: ``text`` [b, s + 1], whose first s tokens predict the last s; negative values are padding.

    Either may have ``loss_mask`` [b, s], weights of the losses by the position that predicts; and ``sample_mask`` [b],
    weights of the rows (0 for repeated or padded rows).

    With padding on the left, give the first token of a row the label -100: predictions from padding are meaningless,
    and Hugging Face's attention implementations do not agree on them either.

    Args:
        eod_token: The token that ends each document of a row, for the following three options.
        reset_position_ids: Whether positions restart from 0 in each document.
        reset_attention_mask: Whether tokens attend only to their own document.
        eod_mask_loss: Whether to exclude the token after an end of document from the loss.
    """

    architecture = "gpt"
    # Class attributes for subclasses whose __init__ does not call this one.
    eod_token: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __init__(
        self,
        *,
        eod_token: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
    ) -> None:
        """Set the options.

        Raises:
            ConfigError: If another option is set and ``eod_token`` is None, or the other way around.
        """
        self.eod_token = eod_token
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and eod_token is None:
                raise ConfigError(
                    f"{name}=True: expected eod_token, got None; give the tokenizer's end of document"
                )
        if eod_token is not None and not (
            reset_position_ids or reset_attention_mask or eod_mask_loss
        ):
            raise ConfigError(
                f"eod_token={eod_token}: expected reset_position_ids, reset_attention_mask or eod_mask_loss, which it "
                "is for, got none; set one, or leave it out"
            )

    def bind(self, model: ModelConfig) -> None:
        """Set the model to train.

        Raises:
            ConfigError: If the model is no GPT or has another head, or ``eod_token`` is not in its vocabulary.
        """
        super().bind(model)
        if not model.has_output_layer:
            raise ConfigError(
                f"{type(self).__name__} trains language models, and this {model.family} has a head for "
                f"task={model.task!r}; use train_step='gpt', which follows the task"
            )
        if self.eod_token is not None and not 0 <= self.eod_token < model.vocab_size:
            raise ConfigError(
                f"eod_token={self.eod_token} must be in 0..{model.vocab_size - 1} (vocab_size); correct it"
            )

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and values out of range; drop inputs without effect.

        Attention without a mask is faster, and the check is cheap on the host. Batches of a subclass with its own
        ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is GPTTrainStep.prepare_batch:
            self.check_inputs(batch)

    def check_inputs(self, batch: Batch) -> None:
        """As ``check_batch``, also for a subclass with its own ``prepare_batch``."""
        self._check_keys(batch)
        if "text" in batch:
            text = batch["text"]
            batch_checks.check_integers("text", text, "token ids")
            batch_checks.check_tokens("text", text.clamp(min=0), self.model, shortest=2)
            rows, length = text.shape
            length -= 1
        else:
            batch_checks.check_tokens("input_ids", batch["input_ids"], self.model)
            rows, length = batch["input_ids"].shape
        batch_checks.check_token_inputs(batch, rows, length, self.model)
        if "labels" in batch:
            batch_checks.check_integers(
                "labels",
                batch["labels"],
                "each token's label at its own position",
                (rows, length),
            )
            batch_checks.check_range(
                "labels",
                batch["labels"],
                self.model.vocab_size,
                "vocab_size",
                (base.IGNORE_INDEX,),
            )
            batch_checks.warn_of_padding_that_predicts(batch, shift_labels(batch["labels"]) >= 0)
        batch_checks.drop_without_effect(batch)

    def _check_keys(self, batch: Batch) -> None:
        required = {} if "text" in batch else {"input_ids": " (or 'text')"}
        batch_checks.rename_keys(batch, _KNOWN_KEYS, required, "GPTTrainStep")
        for key in ("input_ids", "labels"):
            if "text" in batch and key in batch:
                raise DataError(
                    f"batch keys 'text' and {key!r} both define the targets; leave one of them out"
                )
        if "position_ids" in batch and self.reset_position_ids:
            raise DataError(
                "position_ids are given, and reset_position_ids=True would replace them; leave one out"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``tokens``, ``targets`` int64, ``loss_mask`` fp32, segments and positions int64 if any: [b, s] each.

        Raises:
            DataError: If a key is unknown or missing.
        """
        self._check_keys(batch)
        inputs: Batch = {}
        for name in ("attention_mask", "position_ids"):
            if name in batch:
                inputs[name] = batch[name].long()
        inputs = base.packed_segments(inputs, self.model)
        tokens, targets = _tokens_and_targets(batch, inputs.get("attention_mask"))
        # All negative labels are ignored, as labels may not have been checked.
        loss_mask = base.target_weights(targets >= 0, batch)
        if self.eod_token is not None and self.eod_mask_loss:
            loss_mask = loss_mask.masked_fill(tokens == self.eod_token, 0.0)
        prepared: Batch = {
            "tokens": tokens,
            "targets": targets.clamp(min=0),
            "loss_mask": loss_mask,
            **inputs,
        }
        if self.eod_token is not None and self.reset_attention_mask:
            documents = document_ids(tokens, self.eod_token)
            prepared["attention_mask"] = intersect_segments(documents, inputs.get("attention_mask"))
        if self.eod_token is not None and self.reset_position_ids:
            prepared["position_ids"] = document_positions(tokens, self.eod_token)
        return prepared

    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Tensor, LossFunc]:
        """Run a microbatch: per-token losses [b, s] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch["targets"],
        )
        return output, partial(self.loss_func, batch)


def _tokens_and_targets(batch: Batch, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Input tokens and the target of each, [b, s] int64; ``IGNORE_INDEX`` for no target."""
    if "text" in batch:
        text = batch["text"].long()
        tokens = text[:, :-1].clamp(min=0)
        targets = text[:, 1:]
        targets = targets.masked_fill(targets < 0, base.IGNORE_INDEX)
        return tokens.contiguous(), targets.contiguous()
    tokens = batch["input_ids"].long()
    if "labels" not in batch:
        return tokens, next_tokens(tokens, attention_mask)
    return tokens, shift_labels(batch["labels"].long())


# ---- targets and documents, pure functions of tokens ----------------------------------------------------------------


def document_ids(tokens: Tensor, eod_token: int) -> Tensor:
    """Number of each token's document within its row: [b, s] int64, from 1; an ``eod_token`` ends its document.

    Args:
        tokens: [b, s].
        eod_token: The last token of each document.
    """
    is_end = (tokens == eod_token).long()
    return 1 + is_end.cumsum(-1) - is_end


def document_positions(tokens: Tensor, eod_token: int) -> Tensor:
    """Position of each token within its document: [b, s] int64, from 0.

    Args:
        tokens: [b, s].
        eod_token: The last token of each document.
    """
    positions = torch.arange(
        tokens.shape[1],
        device=tokens.device,
    ).expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(
        tokens[:, :-1] == eod_token,
        positions[:, 1:],
        0,
    )
    return positions - starts.cummax(-1).values


def intersect_segments(documents: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Split the segments of an attention mask by document: [b, s] int64.

    Args:
        documents: [b, s], document numbers, at least 1 and at most s.
        attention_mask: [b, s], segment numbers, 0 for padding, which remains 0; None for no mask.
    """
    if attention_mask is None:
        return documents
    return (attention_mask * (documents.shape[1] + 1) + documents).masked_fill(
        attention_mask == 0, 0
    )


def shift_labels(labels: Tensor) -> Tensor:
    """Turn labels at the tokens' own positions into targets of the positions that predict them.

    Args:
        labels: [b, s], ``IGNORE_INDEX`` where there is no target.

    Returns:
        [b, s]: the label one to the right; the last position has none.
    """
    shifted = torch.full_like(labels, base.IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def next_tokens(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Next token of each position as its target, except padding and predictions from padding.

    The mask identifies padding, not the token id: a model that pads with the end-of-text token still learns that token.

    Args:
        tokens: [b, s].
        attention_mask: [b, s], 0 for padding; None for no mask.

    Returns:
        [b, s]: the token one to the right, ``IGNORE_INDEX`` for no target.
    """
    if attention_mask is None:
        return shift_labels(tokens)
    is_padding = attention_mask == 0
    targets = shift_labels(tokens.masked_fill(is_padding, base.IGNORE_INDEX))
    return targets.masked_fill(is_padding, base.IGNORE_INDEX)


# ---- last word (LAMBADA) --------------------------------------------------------------------------------------------


class TokenOutput(NamedTuple):
    """Output of the last stage for a microbatch."""

    losses: Tensor
    """[b, s], fp32: cross-entropy of the target."""
    is_predicted: Tensor
    """[b, s], bool: whether the target is the most likely token."""


class LastWordTrainStep(GPTTrainStep):
    """``GPTTrainStep`` with last-word accuracy: the fraction of rows whose targets are all predicted greedily.

    A row's targets are the tokens of the last word, each predicted from the true tokens before it (batches of
    ``TextEvaluationDataModule(task="last_word")``, or any GPT batch whose ``labels`` are -100 elsewhere). Validation
    and test log ``last_word_accuracy`` over the rows with targets, besides the loss and perplexity of the targets. Of
    equally likely tokens the first one counts, as with ``argmax``.

    Source: Megatron-LM core_r0.16, tasks/zeroshot_gpt/evaluate.py (task LAMBADA).
    """

    @override
    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run a microbatch: ``TokenOutput`` on the last stage, with all-reduces over tp; hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            batch.get("attention_mask"),
        )
        chunk: Any = unwrap(model)
        if chunk.post_process:
            predicted = vocab_parallel_argmax(output.detach(), chunk.pg_collection.tp)
            # The loss may overwrite the logits.
            losses = chunk.compute_language_model_loss(
                batch["targets"], output.transpose(0, 1).contiguous()
            )
            output = TokenOutput(losses=losses, is_predicted=predicted == batch["targets"])
        return output, partial(self.loss_func, batch)

    @override
    def loss_func(
        self,
        batch: Batch,
        output: Output,
    ) -> dict[str, LossTerm]:
        return super().loss_func(batch, output.losses)

    @override
    def metrics(self) -> dict[str, Metric]:
        """Return ``last_word_accuracy`` of the rows and ``perplexity`` of their targets."""
        return {**super().metrics(), "last_word_accuracy": WeightedMean()}

    @override
    def update_metrics(
        self,
        metrics: Mapping[str, Metric],
        batch: Batch,
        output: Output,
    ) -> None:
        """Update the metrics with one microbatch; rows without targets (or with weight 0) do not count."""
        super().update_metrics(metrics, batch, output.losses)
        is_target = batch["loss_mask"] > 0
        is_correct = (output.is_predicted | ~is_target).all(dim=-1)
        metrics["last_word_accuracy"].update(is_correct, is_target.any(dim=-1))
