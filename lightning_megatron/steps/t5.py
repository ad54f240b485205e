"""Objective of T5: cross-entropy of the decoder's tokens, on Hugging Face batches and on Megatron's samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from lightning_megatron.engine.schedule import Batch, LossFunc
from lightning_megatron.errors import DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base
from lightning_megatron.steps.gpt import TokenLossStep

MEGATRON_NAMES = {
    "text_enc": "input_ids",
    "text_dec": "decoder_input_ids",
    "enc_mask": "attention_mask",
    "dec_mask": "decoder_attention_mask",
    "enc_dec_mask": "cross_mask",
}
"""What Megatron's samples call what Hugging Face calls otherwise."""

_KNOWN = (*MEGATRON_NAMES.values(), "labels", "loss_mask", "sample_mask", "truncated")
"""Whether a sample was cut short (``truncated``) changes nothing."""


class T5TrainStep(TokenLossStep):
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

    def bind(self, model: ModelConfig) -> None:
        """Learn which tokens start and pad.

        Raises:
            ConfigError: If the model is no T5.
        """
        base.check_trains(self, "t5", model)
        super().bind(model)

    def check_batch(self, batch: Batch) -> None:
        """Refuse unknown keys, wrong shapes and kinds, numbers out of range, and masks that contradict each other.

        A subclass that prepares batches in its own way is expected to have keys of its own, which are not looked at.

        Raises:
            DataError: With the key, the value and the rule.
        """
        if base.has_own_batches(self, T5TrainStep):
            return
        named = _named(batch)
        for name in ("input_ids", "decoder_input_ids"):
            if name in named:
                base.check_tokens(_given_name(name, batch), named[name], self.model)
        labels = named["labels"]
        base.check_integers("labels", labels, "they are tokens")
        if labels.dim() != 2 or labels.shape[1] < 1:
            raise DataError(f"labels has the shape {list(labels.shape)}; give it as [rows, tokens], at least 1 each")
        base.check_numbers("labels", labels, self.model.vocab_size, "vocab_size", base.IGNORED_LABELS)
        _check_shapes(named)
        for name in ("attention_mask", "decoder_attention_mask", "cross_mask"):
            if name in named:
                mask = named[name]
                base.check_all(_given_name(name, batch), mask, (mask == 0) | (mask == 1), "1 to be seen or 0")
        if "cross_mask" in named:
            encoder = named.get("attention_mask")
            seen = named["input_ids"].new_ones(named["input_ids"].shape) if encoder is None else visible_keys(encoder)
            # Rows of padding in the decoder may be told to see nothing.
            if not torch.equal(visible_keys(named["cross_mask"]).bool(), seen.bool()):
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
            named["decoder_input_ids"].long() if "decoder_input_ids" in named else shifted_right(labels, self.model)
        )
        prepared = {
            "encoder_ids": named["input_ids"].long(),
            "decoder_ids": decoder_ids,
            "targets": labels.clamp(min=0),
            "loss_mask": base.weighted(labels != base.IGNORE_INDEX, named),
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
    return base.by_known_names(batch, _KNOWN, {"input_ids": "", "labels": ""}, "T5TrainStep", MEGATRON_NAMES)


def _given_name(name: str, batch: Batch) -> str:
    """What the user calls it."""
    return next(key for key in batch if MEGATRON_NAMES.get(key, key) == name)


def _check_shapes(named: Batch) -> None:
    encoder, decoder = tuple(named["input_ids"].shape), tuple(named["labels"].shape)
    allowed: dict[str, tuple[tuple[int, ...], ...]] = {
        "decoder_input_ids": (decoder,),
        "loss_mask": (decoder,),
        "sample_mask": (decoder[:1],),
        "attention_mask": (encoder, (*encoder, encoder[1])),
        "decoder_attention_mask": (decoder, (*decoder, decoder[1])),
        "cross_mask": (encoder, (*decoder, encoder[1])),
    }
    for name, shapes in allowed.items():
        if name in named:
            base.check_shape(name, named[name], "as the tokens that it is about", *shapes)


def shifted_right(labels: torch.Tensor, model: ModelConfig) -> torch.Tensor:
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
