"""Rows laid out for a model: padding, positions, and a first token."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.pipeline import ModelInputs
from lightning_megatron.steps.base import Batch


def inputs_for_logits(inputs: Batch) -> ModelInputs:
    """Model inputs of complete rows, for logits without KV caches."""
    has_source = "decoder_input_ids" in inputs
    positions = inputs.get("position_ids")
    tokens = inputs["decoder_input_ids" if has_source else "input_ids"]
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=inputs.get("decoder_attention_mask" if has_source else "attention_mask"),
        longest=tokens.shape[1] if positions is None else int(positions.max()) + 1,
        source=inputs["input_ids"] if has_source else None,
        source_mask=inputs.get("attention_mask") if has_source else None,
        token_types=inputs.get("token_type_ids"),
    )


def left_padded(input_ids: Tensor, attention_mask: Tensor | None) -> ModelInputs:
    """Prompts as model inputs, with padding moved to the left and positions counted from 0.

    All rows then end in the same column, so that each new token of all rows has the same cache slot.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
    """
    tokens = input_ids.long()
    mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
    lengths = mask.sum(-1)
    longest = int(lengths.max())
    shortest = int(lengths.min())
    # Padding need not be a token of the vocabulary, but is embedded.
    tokens, mask = (tensor[:, -longest:] for tensor in _pad_left(tokens * mask, mask))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=mask if shortest < longest else None,
        longest=longest,
    )


def _pad_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=-1, stable=True)
    return tokens.gather(-1, order), mask.gather(-1, order)


def prepend_token(
    input_ids: Tensor, attention_mask: Tensor | None, token: int
) -> tuple[Tensor, Tensor]:
    """Prepend ``token`` to the rows, unless all of them begin with it already; returns tokens and mask.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding on any side; None for no padding.
        token: Beginning-of-sequence token.

    Returns:
        Tokens and mask, [b, s + 1] with the padding on the left, one column more of it in rows that begin with
        ``token`` already; or [b, s] as given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    begins = input_ids.gather(-1, mask.argmax(dim=-1, keepdim=True)) == token
    if bool(begins.all()):
        return input_ids, mask
    tokens = torch.cat((torch.full_like(input_ids[:, :1], token), input_ids), dim=-1)
    return _pad_left(tokens, torch.cat(((~begins).to(mask.dtype), mask), dim=-1))
