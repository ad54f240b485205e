"""How does a GPT learn? Next-token prediction on Hugging Face batches and on Megatron's indexed samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch, LossFunc
from lightning_megatron.steps.checks import check_integers, check_labels, check_numbers, check_shape
from lightning_megatron.steps.masks import (
    IGNORE_INDEX,
    document_numbers,
    document_positions,
    joint_segments,
    next_tokens,
    shift_labels,
)
from lightning_megatron.steps.token_loss import TokenLossStep

_KNOWN_KEYS = {"text", "input_ids", "labels", "attention_mask", "position_ids", "sample_mask", "loss_mask"}


class GPTTrainStep(TokenLossStep):
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
            ConfigError: If something shall happen there and nobody says where it is.
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
        if model.architecture != "gpt":
            raise ConfigError(
                f"GPTTrainStep trains GPTs, and {model.family} is a {model.architecture.upper()}; use "
                f"train_step={model.architecture!r}"
            )
        if self.eod_token is not None and not 0 <= self.eod_token < model.vocab_size:
            raise ConfigError(
                f"eod_token={self.eod_token} must be in 0..{model.vocab_size - 1} (vocab_size={model.vocab_size}); "
                "give the tokenizer's end of document"
            )
        super().bind(model)

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
        tokens = batch["text"] if "text" in batch else batch["input_ids"]
        name, vocab_size = "text" if "text" in batch else "input_ids", self.model.vocab_size
        if tokens.dim() != 2:
            raise DataError(f"{name} has the shape {list(tokens.shape)}; give it as [rows, tokens]")
        check_integers(name, tokens, "they number rows of the embedding")
        check_numbers(name, tokens.clamp(min=0) if name == "text" else tokens, vocab_size, "vocab_size")
        rows, length = tokens.shape[0], tokens.shape[1] - (name == "text")
        self._check_length(name, length)
        for key in ("labels", "attention_mask", "position_ids", "loss_mask"):
            if key in batch:
                check_shape(key, batch[key], (rows, length), "one number for each token that the model reads")
        if "sample_mask" in batch:
            check_shape("sample_mask", batch["sample_mask"], (rows,), "one weight per row")
        self._check_values(batch)
        if "attention_mask" in batch and bool((batch["attention_mask"] == 1).all()):
            del batch["attention_mask"]

    def _check_values(self, batch: Batch) -> None:
        if "labels" in batch:
            check_integers("labels", batch["labels"], "they are tokens")
            check_labels("labels", batch["labels"], self.model.vocab_size, "vocab_size", ignored=(IGNORE_INDEX,))
        if "position_ids" in batch:
            check_integers("position_ids", batch["position_ids"], "they count tokens")
            limit = self.model.max_position_embeddings if self._has_position_table else None
            check_numbers("position_ids", batch["position_ids"], limit, "max_position_embeddings")
        if "attention_mask" in batch:
            mask = batch["attention_mask"]
            check_numbers("attention_mask", mask, None, "")
            if not torch.equal(mask.long().to(mask.dtype), mask):
                raise DataError(
                    "attention_mask has fractions; give 1 for tokens and 0 for padding, or whole numbers of segments"
                )

    @property
    def _has_position_table(self) -> bool:
        return self.model.position_embedding_type == "learned_absolute"

    def _check_length(self, name: str, length: int) -> None:
        limit = self.model.max_position_embeddings
        if length < 1:
            raise DataError(f"{name} has no token to predict from; give rows of at least {2 if name == 'text' else 1}")
        if length > limit and self._has_position_table:
            raise DataError(
                f"{name} has {length} tokens per row that the model reads, more than max_position_embeddings={limit}; "
                f"cut the rows to {limit}"
            )

    def _check_keys(self, batch: Batch) -> None:
        for key in sorted(set(batch) - _KNOWN_KEYS):
            raise DataError(
                f"batch key {key!r} is not understood by GPTTrainStep; use {', '.join(sorted(_KNOWN_KEYS))}, or "
                "override prepare_batch"
            )
        if "text" not in batch and "input_ids" not in batch:
            raise DataError(
                f"batch keys {', '.join(sorted(batch))} have no 'input_ids' (or 'text'); name the tokens so"
            )
        for key in ("input_ids", "labels"):
            if "text" in batch and key in batch:
                raise DataError(f"batch keys 'text' and {key!r} both say what is to be learned; leave one of them out")
        if "position_ids" in batch and self.reset_position_ids:
            raise DataError(
                "position_ids are given, and reset_position_ids=True would replace them; leave one of them out"
            )

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens``, ``targets`` int64, ``loss_mask`` fp32 and, if any, segments and positions int64: [b, s] each.

        Raises:
            DataError: If there are neither ``input_ids`` nor ``text``, a key is not understood, or two contradict.
        """
        self._check_keys(batch)
        given: Batch = {name: batch[name].long() for name in ("attention_mask", "position_ids") if name in batch}
        tokens, targets = _tokens_and_targets(batch, given.get("attention_mask"))
        # No token is negative, so neither is a label that nobody has checked.
        loss_mask = (targets >= 0).float()
        if "loss_mask" in batch:
            loss_mask = loss_mask * batch["loss_mask"]
        if "sample_mask" in batch:
            loss_mask = loss_mask * batch["sample_mask"].to(loss_mask.dtype)[:, None]
        if self.eod_token is not None and self.eod_mask_loss:
            loss_mask = loss_mask.masked_fill(tokens == self.eod_token, 0.0)
        prepared: Batch = {"tokens": tokens, "targets": targets.clamp(min=0), "loss_mask": loss_mask, **given}
        if self.eod_token is not None and self.reset_attention_mask:
            documents = document_numbers(tokens, self.eod_token)
            prepared["attention_mask"] = joint_segments(documents, given.get("attention_mask"))
        if self.eod_token is not None and self.reset_position_ids:
            prepared["position_ids"] = document_positions(tokens, self.eod_token)
        return prepared

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row."""
        return batch["tokens"].shape[1]

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
        return text[:, :-1].clamp(min=0).contiguous(), targets.masked_fill(targets < 0, IGNORE_INDEX).contiguous()
    tokens = batch["input_ids"].long()
    if "labels" not in batch:
        return tokens, next_tokens(tokens, attention_mask)
    labels = batch["labels"].long()
    if labels.shape != tokens.shape:
        raise DataError(
            f"labels have the shape {list(labels.shape)} and input_ids {list(tokens.shape)}; give each token one label "
            "at its own position (they are shifted here)"
        )
    return tokens, shift_labels(labels)
