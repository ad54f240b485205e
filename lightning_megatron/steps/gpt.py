"""How does a GPT learn? Next-token prediction on Hugging Face batches and on Megatron's indexed samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.steps.base import Batch, LossFunc, LossTerm, TrainStep
from lightning_megatron.steps.masks import IGNORE_INDEX, causal_padding_mask, shift_labels

_KNOWN_KEYS = {"text", "input_ids", "labels", "attention_mask", "position_ids", "sample_mask", "loss_mask"}


class GPTTrainStep(TrainStep):
    """Cross-entropy of the next token, averaged over the targets of the global batch.

    Accepts two kinds of batches, [b, s] each:

    * Hugging Face's: ``input_ids`` and, optionally, ``labels`` (at the tokens' own positions, -100 ignored; absent:
      every token is a target), ``attention_mask``, ``position_ids``.
    * Megatron's: ``text`` [b, s + 1], whose first s tokens predict the last s; negative numbers are padding.

    Either may carry ``sample_mask`` [b]: the loss of a row counts this much (0 for repeated or filled-in rows).
    """

    loss_terms: ClassVar[tuple[str, ...]] = ("lm_loss",)

    def prepare_batch(self, batch: Batch) -> Batch:
        """``tokens``, ``targets`` [b, s] int64; ``loss_mask`` [b, s] fp32; the user's mask and positions, if any.

        Raises:
            DataError: If there are neither ``input_ids`` nor ``text``, or a key is not understood.
        """
        unknown = sorted(set(batch) - _KNOWN_KEYS)
        if unknown:
            raise DataError(
                f"batch key {unknown[0]!r} is not understood by GPTTrainStep; use {', '.join(sorted(_KNOWN_KEYS))}, or "
                "override prepare_batch"
            )
        tokens, targets = _tokens_and_targets(batch)
        loss_mask = (targets != IGNORE_INDEX).float()
        if "loss_mask" in batch:
            loss_mask = loss_mask * batch["loss_mask"]
        if "sample_mask" in batch:
            loss_mask = loss_mask * batch["sample_mask"].to(loss_mask.dtype)[:, None]
        prepared = {
            "tokens": tokens,
            "targets": targets.clamp(min=0),
            "loss_mask": loss_mask,
        }
        return prepared | {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Repeat the last row with an empty loss mask."""
        missing = num_rows - batch["tokens"].shape[0]
        padded = {k: torch.cat([v, v[-1:].expand(missing, *v.shape[1:])]) for k, v in batch.items()}
        padded["loss_mask"] = F.pad(batch["loss_mask"], (0, 0, 0, missing))
        return padded

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row."""
        return batch["tokens"].shape[1]

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The number of targets, known from the masks alone."""
        return {"lm_loss": batch["loss_mask"].sum()}

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
        """Per-token losses [b, s] on the last stage, hidden states before it."""
        batch = self.get_batch(data_iterator)
        mask = batch.get("attention_mask")
        output = model(
            batch["tokens"],
            batch.get("position_ids"),
            None if mask is None else causal_padding_mask(mask),
            labels=batch["targets"],
        )
        return output, partial(self.loss_func, batch)

    def loss_func(self, batch: Batch, output: torch.Tensor) -> dict[str, LossTerm]:
        """The masked sum of the per-token losses.

        Args:
            batch: The prepared microbatch.
            output: Per-token cross-entropy, [b, s], fp32.
        """
        loss_mask = batch["loss_mask"]
        return {"lm_loss": LossTerm((output.float() * loss_mask).sum(), loss_mask.sum())}


def _tokens_and_targets(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the token that each should predict, [b, s] int64; ``IGNORE_INDEX`` where there is none."""
    if "text" in batch:
        text = batch["text"].long()
        targets = text[:, 1:]
        return text[:, :-1].clamp(min=0).contiguous(), targets.masked_fill(targets < 0, IGNORE_INDEX).contiguous()
    if "input_ids" not in batch:
        raise DataError(f"batch keys {', '.join(sorted(batch))} have no 'input_ids' (or 'text'); name the tokens so")
    tokens = batch["input_ids"].long()
    labels = batch["labels"].long() if "labels" in batch else tokens
    if labels.shape != tokens.shape:
        raise ConfigError(
            f"labels have the shape {list(labels.shape)} and input_ids {list(tokens.shape)}; give each token one label "
            "at its own position (they are shifted here)"
        )
    return tokens, shift_labels(labels)
