"""Train step of T5: cross-entropy of the decoder's tokens, for Hugging Face batches and Megatron's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from lightning_megatron.engine.objective import Batch, LossFunc
from lightning_megatron.errors import DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.base import MaskedLossStep

MEGATRON_NAMES = {
    "text_enc": "input_ids",
    "text_dec": "decoder_input_ids",
    "enc_mask": "attention_mask",
    "dec_mask": "decoder_attention_mask",
}
"""Keys of Megatron's samples, and Hugging Face's names for them."""

_KNOWN = (
    *MEGATRON_NAMES.values(),
    "enc_dec_mask",
    "labels",
    "loss_mask",
    "sample_mask",
    "truncated",
)
"""Keys of a batch by Hugging Face's names; ``truncated`` is ignored."""


class T5TrainStep(MaskedLossStep):
    """Cross-entropy of the decoder's next token, averaged over the targets of the global batch.

    Accepts two kinds of batches:

    * Hugging Face's: ``input_ids`` [b, s_enc] and ``labels`` [b, s_dec] (-100 ignored) and, optionally,
      ``attention_mask`` [b, s_enc], ``decoder_input_ids`` and ``decoder_attention_mask`` [b, s_dec]. Without
      ``decoder_input_ids`` the decoder's input is the labels shifted right by one.
    * Megatron's: ``text_enc``, ``text_dec``, ``labels`` (-1 ignored) and, optionally, ``enc_mask``, ``dec_mask``,
      ``enc_dec_mask``: 1 for visible keys, [b, keys] or [b, queries, keys], causal or not.

    Encoder padding is masked in both stacks; the decoder is causal, and attends to its own padding unless masked.
    Either kind may have ``loss_mask`` [b, s_dec] and ``sample_mask`` [b], weights of tokens and of rows.
    """

    architecture = "t5"

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and dtypes, values out of range, and inconsistent masks.

        Batches of a subclass with its own ``prepare_batch`` are not checked, as their keys may differ.

        Raises:
            DataError: With the key, the value and the rule.
        """
        if type(self).prepare_batch is not T5TrainStep.prepare_batch:
            return
        renamed = _renamed(batch)
        for name in ("input_ids", "decoder_input_ids"):
            if name in renamed:
                batch_checks.check_tokens(name, renamed[name], self.model)
        labels = renamed["labels"]
        batch_checks.check_tokens("labels", labels, self.model, ignored=base.IGNORED_LABELS)
        encoder = tuple(renamed["input_ids"].shape)
        decoder = tuple(labels.shape)
        allowed: dict[str, tuple[tuple[int, ...], ...]] = {
            "decoder_input_ids": (decoder,),
            "loss_mask": (decoder,),
            "sample_mask": (decoder[:1],),
            "attention_mask": (encoder, (*encoder, encoder[1])),
            "decoder_attention_mask": (decoder, (*decoder, decoder[1])),
            "enc_dec_mask": (encoder, (*decoder, encoder[1])),
        }
        for name in (key for key in allowed if key in renamed):
            batch_checks.check_shape(name, renamed[name], "the shape of its tokens", *allowed[name])
            if name in ("attention_mask", "decoder_attention_mask", "enc_dec_mask"):
                is_valid = (renamed[name] == 0) | (renamed[name] == 1)
                batch_checks.check_values(name, renamed[name], is_valid, "1 (visible) or 0")
            elif name in ("loss_mask", "sample_mask"):
                batch_checks.check_weights(name, renamed[name])
        if "enc_dec_mask" in renamed:
            visible = visible_keys(
                renamed.get("attention_mask", torch.ones_like(renamed["input_ids"]))
            )
            # Keys visible to any query, as decoder padding may attend to nothing.
            if not torch.equal(visible_keys(renamed["enc_dec_mask"]).bool(), visible.bool()):
                raise DataError(
                    "enc_dec_mask: expected the visible encoder tokens of enc_mask, got others; correct it"
                )

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return ``encoder_ids``, ``decoder_ids``, ``targets`` int64, ``loss_mask`` fp32, and masks [b, s] if any.

        Raises:
            DataError: If a key is unknown or missing.
        """
        renamed = _renamed(batch)
        labels = renamed["labels"].long()
        # All negative labels are ignored, including Megatron's -1.
        labels = labels.masked_fill(labels < 0, base.IGNORE_INDEX)
        if "decoder_input_ids" in renamed:
            decoder_ids = renamed["decoder_input_ids"].long()
        else:
            decoder_ids = shift_right(labels, self.model)
        prepared = {
            "encoder_ids": renamed["input_ids"].long(),
            "decoder_ids": decoder_ids,
            "targets": labels.clamp(min=0),
            "loss_mask": base.target_weights(labels != base.IGNORE_INDEX, renamed),
        }
        for mask, name in (
            ("encoder_mask", "attention_mask"),
            ("decoder_mask", "decoder_attention_mask"),
        ):
            if name in renamed:
                prepared[mask] = visible_keys(renamed[name])
        return prepared

    def seq_length(self, batch: Batch) -> int:
        """Return encoder plus decoder tokens per row: pipeline stages send both hidden states in one tensor."""
        return sum(self.split_lengths(batch).values())

    def split_lengths(self, batch: Batch) -> Mapping[str, int]:
        """Return encoder and decoder lengths, each of which sequence parallelism splits."""
        return {
            "length of input_ids": batch["encoder_ids"].shape[1],
            "length of labels": batch["decoder_ids"].shape[1],
        }

    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Tensor, LossFunc]:
        """Run a microbatch: per-token losses [b, s_dec] on the last stage, hidden states of both stacks before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["encoder_ids"],
            batch["decoder_ids"],
            batch.get("encoder_mask"),
            batch.get("decoder_mask"),
            labels=batch["targets"],
        )
        return output, partial(self.loss_func, batch)


def _renamed(batch: Batch) -> Batch:
    """Return the batch by Hugging Face's names."""
    return batch_checks.rename_keys(
        batch,
        _KNOWN,
        {"input_ids": "", "labels": ""},
        "T5TrainStep",
        MEGATRON_NAMES,
    )


def shift_right(labels: Tensor, model: ModelConfig) -> Tensor:
    """Decoder input for ``labels``, as in Hugging Face's T5: the start token and all labels but the last.

    Args:
        labels: [b, s], int64; negative labels (no target) become padding.
        model: Config with the decoder's start token and the padding token.
    """
    shifted = labels.roll(1, dims=1)
    shifted = shifted.masked_fill(shifted < 0, model.pad_token_id)
    shifted[:, 0] = model.decoder_start_token_id
    return shifted


def visible_keys(mask: Tensor) -> Tensor:
    """Reduce a mask [b, keys] or [b, queries, keys] to the keys visible to any query: [b, keys] int64, 1 or 0."""
    visible = mask > 0.5 if mask.is_floating_point() else mask != 0
    if visible.dim() == 3:
        visible = visible.any(dim=1)
    return visible.long()
