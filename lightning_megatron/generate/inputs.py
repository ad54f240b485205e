"""Rows of batches and calls as inputs of a model, by Hugging Face's names, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError, DataError, type_of
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import bert, t5
from lightning_megatron.steps.base import Batch
from lightning_megatron.steps.batch_checks import check_token_inputs, check_tokens

_MEGATRON_NAMES = {
    "bert": bert.MEGATRON_NAMES,
    "gpt": {"text": "input_ids"},
    "t5": t5.MEGATRON_NAMES,
}
"""Hugging Face's names for the keys of Megatron's samples, by architecture."""
_INPUT_NAMES = {
    "bert": ("input_ids", "attention_mask", "token_type_ids", "position_ids"),
    "gpt": ("input_ids", "attention_mask", "position_ids"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


def inputs_from_batch(
    batch: Mapping[str, Tensor], model: ModelConfig, *, for_generation: bool
) -> Batch:
    """Model inputs from a batch, by Hugging Face's names, without rows that only fill it up (``sample_mask`` 0).

    Megatron's samples (``text``, ``text_enc``, ...) are read as in training. Without ``decoder_input_ids`` a T5's
    decoder reads the labels shifted to the right by one. For generation, the decoder's inputs in a batch with
    ``labels`` are answers to learn, and are left out.

    Args:
        batch: With any keys; those that are no inputs are ignored.
        model: Config of the model.
        for_generation: Whether the rows are prompts (a GPT's under Hugging Face's names only) rather than complete
            rows.

    Raises:
        DataError: If there are no tokens.
    """
    is_t5 = model.architecture == "t5"
    names = dict(_MEGATRON_NAMES[model.architecture])
    read = list(_INPUT_NAMES[model.architecture])
    if for_generation:
        if not is_t5:
            names = {}
            read.remove("position_ids")
        elif "labels" in batch:
            read = ["input_ids", "attention_mask"]
    names.update(zip(read, read, strict=True))
    inputs: Batch = {}
    for key, name in names.items():
        if key in batch and name in read:
            inputs[name] = batch[key]
    given = ", ".join(sorted(batch))
    if "input_ids" not in inputs:
        expected = "'input_ids' (or 'text_enc')" if is_t5 else "'input_ids'"
        purpose = "prompts" if for_generation else "logits"
        raise DataError(f"batch: expected {expected} for {purpose}, got {given}")
    if not for_generation and model.architecture == "gpt" and "text" in batch:
        text = batch["text"][:, :-1]
        inputs["input_ids"] = text.clamp(min=0)
    if is_t5:
        if not for_generation and "decoder_input_ids" not in inputs:
            if "labels" not in batch:
                raise DataError(f"batch: expected 'decoder_input_ids' or 'labels', got {given}")
            inputs["decoder_input_ids"] = t5.shift_right(batch["labels"].long(), model)
        for name, tensor in inputs.items():
            if name.endswith("mask"):
                inputs[name] = t5.visible_keys(tensor)
    if "sample_mask" in batch:
        is_row = batch["sample_mask"] != 0
        inputs = {name: tensor[is_row] for name, tensor in inputs.items()}
    return inputs


def check_rows(inputs: Batch, model: ModelConfig) -> None:
    """Raise if the model cannot compute logits of the rows. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: With the name, the value, the rule and the fix.
    """
    rows = read_rows(inputs, model, for_generation=False)
    for name, (tokens, _) in rows.items():
        # Padding is embedded, too.
        check_tokens(name, tokens, model)
    count, length = inputs["input_ids"].shape
    check_token_inputs(inputs, count, length, model)


def read_rows(
    inputs: Batch, model: ModelConfig, *, for_generation: bool
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Check rows and return their tokens by name, each with its mask or None for no padding.

    Raises:
        ConfigError: If an input is not one of the model's, tokens are not [b, s] integers, or a mask is not [b, s] of 0
            and 1 or, for logits of a GPT, of segment numbers.
    """
    for name in inputs:
        if name not in _INPUT_NAMES[model.architecture]:
            raise ConfigError(f"{name} is no input of {model.family}; leave it out")
    needs_decoder = "decoder_attention_mask" in inputs or (
        model.architecture == "t5" and not for_generation
    )
    if needs_decoder and "decoder_input_ids" not in inputs:
        raise ConfigError(
            f"{model.family} needs decoder_input_ids here, the tokens of its decoder; give them"
        )
    has_segments = model.architecture == "gpt" and not for_generation
    rows = {}
    for name in [key for key in inputs if key.endswith("input_ids")]:
        tokens = inputs[name]
        mask_name = name.replace("input_ids", "attention_mask")
        is_integer = (
            isinstance(tokens, Tensor)
            and not tokens.is_floating_point()
            and tokens.dtype != torch.bool
        )
        if not is_integer or tokens.dim() != 2 or tokens.numel() == 0:
            raise ConfigError(
                f"{name}: expected a tensor of integers, [prompts, tokens], got {_describe(tokens)}"
            )
        mask: Any = inputs.get(mask_name)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
                raise ConfigError(
                    f"{mask_name}: expected the shape {list(tokens.shape)} of {name}, got {_describe(mask)}"
                )
            is_valid = (mask == 0) | (mask == 1)
            if not has_segments and not bool(is_valid.all()):
                raise ConfigError(
                    f"{mask_name}: expected 1 for tokens and 0 for padding, got other values"
                )
        rows[name] = (tokens, mask)
    if "decoder_input_ids" in rows:
        expected = len(inputs["input_ids"])
        got = len(rows["decoder_input_ids"][0])
        if expected != got:
            raise ConfigError(
                f"decoder_input_ids: expected {expected} rows, as input_ids have, got {got}"
            )
    return rows


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return type_of(value)
