"""Objective of T5: cross-entropy of the decoder's tokens, on Hugging Face batches and on Megatron's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from lightning_megatron.engine.schedule import Batch, LossFunc
from lightning_megatron.errors import DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base
from lightning_megatron.steps.gpt import MaskedLossStep

MEGATRON_NAMES = {
    "text_enc": "input_ids",
    "text_dec": "decoder_input_ids",
    "enc_mask": "attention_mask",
    "dec_mask": "decoder_attention_mask",
}
"""What Megatron's samples call what Hugging Face calls otherwise."""

_KNOWN = (*MEGATRON_NAMES.values(), "enc_dec_mask", "labels", "loss_mask", "sample_mask", "truncated")
"""Whether a sample was cut short (``truncated``) changes nothing."""


class T5TrainStep(MaskedLossStep):
    """Cross-entropy of the decoder's next token, averaged over the targets of the global batch.

    Accepts two kinds of batches:

    * Hugging Face's: ``input_ids`` [b, s_enc] and ``labels`` [b, s_dec] (-100 ignored) and, optionally,
      ``attention_mask`` [b, s_enc], ``decoder_input_ids`` and ``decoder_attention_mask`` [b, s_dec]. Without
      ``decoder_input_ids`` the decoder reads the labels shifted to the right by one.
    * Megatron's: ``text_enc``, ``text_dec``, ``labels`` (-1 ignored) and, optionally, ``enc_mask``, ``dec_mask``,
      ``enc_dec_mask``: 1 where something is to be seen, [b, keys] or [b, queries, keys], causal or not.

    Padding of the encoder is hidden from both stacks; the decoder sees backwards only, its own padding too unless a
    mask hides it. Either kind may carry ``loss_mask`` [b, s_dec] and ``sample_mask`` [b]: the loss of a token, and of a
    row, counts this much.
    """

    architecture = "t5"

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and kinds, numbers out of range, and masks that contradict each other.

        A subclass that prepares batches in its own way is expected to have keys of its own, which are not looked at.

        Raises:
            DataError: With the key, the value and the rule.
        """
        if type(self).prepare_batch is not T5TrainStep.prepare_batch:
            return
        named = _named(batch)
        for name in ("input_ids", "decoder_input_ids"):
            if name in named:
                base.check_tokens(name, named[name], self.model)
        labels = named["labels"]
        base.check_tokens("labels", labels, self.model, ignored=base.IGNORED_LABELS)
        encoder, decoder = tuple(named["input_ids"].shape), tuple(labels.shape)
        allowed: dict[str, tuple[tuple[int, ...], ...]] = {
            "decoder_input_ids": (decoder,),
            "loss_mask": (decoder,),
            "sample_mask": (decoder[:1],),
            "attention_mask": (encoder, (*encoder, encoder[1])),
            "decoder_attention_mask": (decoder, (*decoder, decoder[1])),
            "enc_dec_mask": (encoder, (*decoder, encoder[1])),
        }
        for name in (each for each in allowed if each in named):
            base.check_shape(name, named[name], "as the tokens that it is about", *allowed[name])
            if name in ("attention_mask", "decoder_attention_mask", "enc_dec_mask"):
                is_right = (named[name] == 0) | (named[name] == 1)
                base.check_values(name, named[name], is_right, "1 to be seen or 0")
        if "enc_dec_mask" in named:
            seen = visible_keys(named.get("attention_mask", torch.ones_like(named["input_ids"])))
            # Rows of padding in the decoder may be told to see nothing.
            if not torch.equal(visible_keys(named["enc_dec_mask"]).bool(), seen.bool()):
                raise DataError("enc_dec_mask shows other tokens of the encoder than enc_mask; give both the same")

    def prepare_batch(self, batch: Batch) -> Batch:
        """``encoder_ids``, ``decoder_ids``, ``targets`` int64, ``loss_mask`` fp32, and the masks [b, s] that there are.

        Raises:
            DataError: If there are keys that it does not understand.
        """
        named = _named(batch)
        labels = named["labels"].long()
        # Megatron's -1, too: no token is negative.
        labels = labels.masked_fill(labels < 0, base.IGNORE_INDEX)
        decoder_ids = (
            named["decoder_input_ids"].long() if "decoder_input_ids" in named else shift_right(labels, self.model)
        )
        prepared = {
            "encoder_ids": named["input_ids"].long(),
            "decoder_ids": decoder_ids,
            "targets": labels.clamp(min=0),
            "loss_mask": base.target_weights(labels != base.IGNORE_INDEX, named),
        }
        for ours, theirs in (("encoder_mask", "attention_mask"), ("decoder_mask", "decoder_attention_mask")):
            if theirs in named:
                prepared[ours] = visible_keys(named[theirs])
        return prepared

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row of both stacks: stages send the states of encoder and decoder in one message."""
        return sum(self.split_lengths(batch).values())

    def split_lengths(self, batch: Batch) -> Mapping[str, int]:
        """Tokens of the encoder and of the decoder, each of which sequence parallelism splits."""
        return {
            "length of input_ids": batch["encoder_ids"].shape[1],
            "length of labels": batch["decoder_ids"].shape[1],
        }

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunc]:
        """Per-token losses [b, s_dec] on the last stage, packed hidden states before it."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["encoder_ids"],
            batch["decoder_ids"],
            batch.get("encoder_mask"),
            batch.get("decoder_mask"),
            labels=batch["targets"],
        )
        return output, partial(self.loss_func, batch)


def _named(batch: Batch) -> Batch:
    """The batch by Hugging Face's names."""
    return base.rename_keys(batch, _KNOWN, {"input_ids": "", "labels": ""}, "T5TrainStep", MEGATRON_NAMES)


def shift_right(labels: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """What the decoder reads to predict ``labels``, as Hugging Face's T5: the start token and all but the last of them.

    Args:
        labels: [b, s], int64; where one is negative, for no target, stands padding.
        model: Knows the tokens that start and pad.
    """
    shifted = labels.roll(1, dims=1)
    shifted = shifted.masked_fill(shifted < 0, model.pad_token_id)
    shifted[:, 0] = model.decoder_start_token_id
    return shifted


def visible_keys(mask: torch.Tensor) -> torch.Tensor:
    """1 for keys that any query sees, else 0: [b, keys] int64, of a mask [b, keys] or [b, queries, keys]."""
    visible = mask > 0.5 if mask.is_floating_point() else mask != 0
    return (visible.any(dim=1) if visible.dim() == 3 else visible).long()
