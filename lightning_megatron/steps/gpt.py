"""Objectives of GPT (next tokens, and the last words of LAMBADA), and what those of BERT and T5 share with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.engine.schedule import Batch, LossFunc, LossTerm, Output, TrainStep
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import Architecture, ModelConfig
from lightning_megatron.steps import base

_KNOWN_KEYS = {"text", "input_ids", "labels", "attention_mask", "position_ids", "sample_mask", "loss_mask"}


class MaskedLossStep(TrainStep):
    """An objective whose prepared batches have the weight of each target."""

    architecture: ClassVar[Architecture]
    """Of the models that it trains."""
    loss_terms: ClassVar[tuple[str, ...]] = ("lm_loss",)
    masks: Mapping[str, str] = {"lm_loss": "loss_mask"}
    """Where the weights of each term's targets are."""

    def bind(self, model: ModelConfig) -> None:
        """Learn which model is trained.

        Raises:
            ConfigError: If it is of another architecture, with the name of the step for that.
        """
        if model.architecture != self.architecture:
            raise ConfigError(
                f"{type(self).__name__} trains {self.architecture.upper()}s, and {model.family} is a "
                f"{model.architecture.upper()}; use train_step={model.architecture!r}"
            )
        super().bind(model)

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row without targets."""
        rows = next(iter(batch.values())).shape[0]
        padded = {k: torch.cat([v, v[-1:].expand(num_rows - rows, *v.shape[1:])]) for k, v in batch.items()}
        for mask in self.masks.values():
            padded[mask][rows:] = 0
        return padded

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row."""
        return batch["tokens"].shape[1]

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The number of targets of each term, known from the masks alone."""
        return {term: batch[mask].sum() for term, mask in self.masks.items()}

    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """The masked sum of the per-token losses.

        Args:
            batch: The prepared microbatch.
            output: Per-token cross-entropy, [b, s], fp32.
        """
        return {"lm_loss": base.loss_term(output, batch["loss_mask"])}

    def metrics(self) -> dict[str, Metric]:
        """``perplexity`` of the targets."""
        return {"perplexity": base.Perplexity()}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in the losses of one microbatch, each with its weight."""
        metrics["perplexity"].update(output.float(), batch["loss_mask"])


class GPTTrainStep(MaskedLossStep):
    """Cross-entropy of the next token, averaged over the targets of the global batch.

    Accepts two kinds of batches, [b, s] each:

    * Hugging Face's: ``input_ids`` and, optionally, ``labels`` (at the tokens' own positions, -100 ignored; absent:
      every token is a target that ``attention_mask`` does not call padding), ``attention_mask`` (1 for tokens and 0
      for padding; or numbers of segments that do not see each other), ``position_ids``.
    * Megatron's: ``text`` [b, s + 1], whose first s tokens predict the last s; negative numbers are padding.

    Either may carry ``loss_mask`` [b, s]: the loss of what a position predicts counts this much; and ``sample_mask``
    [b]: the loss of a row does (0 for repeated or filled-in rows).

    With padding on the left, give the first token of a row the label -100: what padding predicts says nothing, and
    Hugging Face's implementations of attention do not agree on it either.

    Args:
        eod_token: The token that ends each document of a row, for the following three.
        reset_position_ids: Whether positions count from 0 in each document.
        reset_attention_mask: Whether tokens see only their own document.
        eod_mask_loss: Whether what follows an end of document is no target.
    """

    architecture = "gpt"
    # Here too for subclasses whose __init__ does not call this one.
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
        """Choose what the end of a document means.

        Raises:
            ConfigError: If an option is about the ends of documents and ``eod_token`` is None.
        """
        self.eod_token = eod_token
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.eod_mask_loss = eod_mask_loss
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and eod_token is None:
                raise ConfigError(f"{name}=True needs to know where documents end; give eod_token, the tokenizer's end")

    def bind(self, model: ModelConfig) -> None:
        """Learn the vocabulary.

        Raises:
            ConfigError: If the model is no GPT, or ``eod_token`` is none of its tokens.
        """
        super().bind(model)
        if self.eod_token is not None and not 0 <= self.eod_token < model.vocab_size:
            raise ConfigError(
                f"eod_token={self.eod_token} must be in 0..{model.vocab_size - 1} (vocab_size); correct it"
            )

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and numbers out of range; drop a mask that hides nothing.

        Attention without a mask is faster, and on the host it costs nothing to see that there is none. A subclass that
        prepares batches in its own way is expected to have keys of its own, which are not looked at.

        Raises:
            DataError: With the key, the value, the rule and the fix.
        """
        if type(self).prepare_batch is not GPTTrainStep.prepare_batch:
            return
        self._check_keys(batch)
        name = "text" if "text" in batch else "input_ids"
        if name == "text":
            base.check_integers("text", batch["text"], "they number rows of the embedding")
            base.check_tokens("text", batch["text"].clamp(min=0), self.model, shortest=2)
        else:
            base.check_tokens("input_ids", batch["input_ids"], self.model)
        rows, length = batch[name].shape[0], batch[name].shape[1] - (name == "text")
        base.check_token_inputs(batch, rows, length, self.model)
        if "labels" in batch:
            base.check_integers("labels", batch["labels"], "each token's label at its own position", (rows, length))
            base.check_range("labels", batch["labels"], self.model.vocab_size, "vocab_size", (base.IGNORE_INDEX,))
        if "attention_mask" in batch and bool((batch["attention_mask"] == 1).all()):
            del batch["attention_mask"]

    def _check_keys(self, batch: Batch) -> None:
        needed = {} if "text" in batch else {"input_ids": " (or 'text')"}
        base.rename_keys(batch, _KNOWN_KEYS, needed, "GPTTrainStep")
        for key in ("input_ids", "labels"):
            if "text" in batch and key in batch:
                raise DataError(f"batch keys 'text' and {key!r} both say what is to be learned; leave one of them out")
        if "position_ids" in batch and self.reset_position_ids:
            raise DataError("position_ids are given, and reset_position_ids=True would replace them; leave one out")

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens``, ``targets`` int64, ``loss_mask`` fp32 and, if any, segments and positions int64: [b, s] each.

        Raises:
            DataError: If there are keys that it does not understand.
        """
        self._check_keys(batch)
        given: Batch = {name: batch[name].long() for name in ("attention_mask", "position_ids") if name in batch}
        tokens, targets = _tokens_and_targets(batch, given.get("attention_mask"))
        # No token is negative, so neither is a label that nobody has checked.
        loss_mask = base.target_weights(targets >= 0, batch)
        if self.eod_token is not None and self.eod_mask_loss:
            loss_mask = loss_mask.masked_fill(tokens == self.eod_token, 0.0)
        prepared: Batch = {"tokens": tokens, "targets": targets.clamp(min=0), "loss_mask": loss_mask, **given}
        if self.eod_token is not None and self.reset_attention_mask:
            documents = document_ids(tokens, self.eod_token)
            prepared["attention_mask"] = intersect_segments(documents, given.get("attention_mask"))
        if self.eod_token is not None and self.reset_position_ids:
            prepared["position_ids"] = document_positions(tokens, self.eod_token)
        return prepared

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
        """Per-token losses [b, s] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(batch["tokens"], batch.get("position_ids"), batch.get("attention_mask"), labels=batch["targets"])
        return output, partial(self.loss_func, batch)


def _tokens_and_targets(batch: Batch, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the token that each should predict, [b, s] int64; ``IGNORE_INDEX`` where there is none."""
    if "text" in batch:
        text = batch["text"].long()
        targets = text[:, 1:]
        return text[:, :-1].clamp(min=0).contiguous(), targets.masked_fill(targets < 0, base.IGNORE_INDEX).contiguous()
    tokens = batch["input_ids"].long()
    if "labels" not in batch:
        return tokens, next_tokens(tokens, attention_mask)
    return tokens, shift_labels(batch["labels"].long())


# ---- targets and documents, pure functions of tokens ----------------------------------------------------------------


def document_ids(tokens: torch.Tensor, eod_token: int) -> torch.Tensor:
    """Which document of its row each token is in: [b, s] int64, from 1; an ``eod_token`` ends its document.

    Args:
        tokens: [b, s].
        eod_token: What stands at the end of each document.
    """
    is_end = (tokens == eod_token).long()
    return 1 + is_end.cumsum(-1) - is_end


def document_positions(tokens: torch.Tensor, eod_token: int) -> torch.Tensor:
    """Where in its document each token is: [b, s] int64, from 0.

    Args:
        tokens: [b, s].
        eod_token: What stands at the end of each document.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(tokens[:, :-1] == eod_token, places[:, 1:], 0)
    return places - starts.cummax(-1).values


def intersect_segments(documents: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Segments within which tokens are of the same document and, as the mask says, of the same segment: [b, s] int64.

    Args:
        documents: [b, s], at least 1 and at most s.
        attention_mask: [b, s], 0 for padding, which stays padding; None for no mask.
    """
    if attention_mask is None:
        return documents
    return (attention_mask * (documents.shape[1] + 1) + documents).masked_fill(attention_mask == 0, 0)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """The target of each position when labels stand at the positions of the tokens themselves.

    Args:
        labels: [b, s], ``IGNORE_INDEX`` where there is no target.

    Returns:
        [b, s]: the label one to the right; the last position has none.
    """
    shifted = torch.full_like(labels, base.IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    return shifted


def next_tokens(tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The target of each position when every token is one, but neither padding nor what would follow from padding.

    Padding is told by its position, not by its token: a model whose padding is the end-of-text token learns that too.

    Args:
        tokens: [b, s].
        attention_mask: [b, s], 0 for padding; None for no mask.

    Returns:
        [b, s]: the token one to the right, ``IGNORE_INDEX`` where there is no target.
    """
    if attention_mask is None:
        return shift_labels(tokens)
    is_padding = attention_mask == 0
    return shift_labels(tokens.masked_fill(is_padding, base.IGNORE_INDEX)).masked_fill(is_padding, base.IGNORE_INDEX)


# ---- last words -----------------------------------------------------------------------------------------------------


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
            predicted = base.vocab_parallel_argmax(output.detach(), chunk.pg_collection.tp)
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
        return {**super().metrics(), "last_word_accuracy": base.WeightedMean()}

    @override
    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take in one microbatch; a row without targets (or with the weight 0) does not count."""
        super().update_metrics(metrics, batch, output.losses)
        is_target = batch["loss_mask"] > 0
        is_right = (output.is_predicted | ~is_target).all(dim=-1)
        metrics["last_word_accuracy"].update(is_right, is_target.any(dim=-1))
