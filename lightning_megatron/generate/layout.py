"""Rows laid out for a model: padding, positions, and a first token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch, packed_segments

NO_TARGET = -1
"""Token that fills up the targets of a row."""


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs of one forward pass; the tokens follow those in the KV caches."""

    tokens: Tensor
    """[b, s], int64."""
    positions: Tensor | None
    """[b, s], int64; None for 0, 1, 2, ..."""
    mask: Tensor | None
    """[b, cached + s], int64, 0 for padding; None for no padding."""
    longest: int
    """Number of tokens of the longest row of all replicas, cached ones included."""
    source: Tensor | None = None
    """[b, s_enc], int64, input of the encoder of an encoder-decoder; [b, 0] once the caches hold it. None for other
    models."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source, also in passes after the first; None for no padding."""
    token_types: Tensor | None = None
    """[b, s], int64, for a BERT; None for all zeros."""
    targets: Tensor | None = None
    """[b, t, 2], int64: positions, and the tokens after them whose log-probabilities are computed in place of logits;
    the token is ``NO_TARGET`` in rows with fewer. None for logits."""

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """A copy with ``function`` applied to each tensor."""
        tensors: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = function(value)
        return replace(self, **tensors)

    def rows(self, rows: slice) -> ModelInputs:
        """A slice of the rows."""
        return self.map(lambda tensor: tensor[rows])

    def expand(
        self,
        rows: slice,
        copies: int,
        device: torch.device,
    ) -> ModelInputs:
        """Repeat each row ``copies`` times, one after the other, and take the slice ``rows`` on ``device``."""
        repeated = self.map(lambda tensor: tensor.repeat_interleave(copies, dim=0))
        return repeated.rows(rows).map(lambda tensor: tensor.to(device))

    @property
    def is_token(self) -> Tensor:
        """[b, s], int64, for prompts: 1 for tokens, 0 for padding."""
        return token_mask(self.tokens, self.mask)


def inputs_for_logits(inputs: Batch, model: ModelConfig) -> ModelInputs:
    """Model inputs of complete rows, for logits without KV caches."""
    if model.architecture == "gpt":
        inputs = packed_segments(inputs, model)
    tokens = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    if "decoder_input_ids" in inputs:
        decoder_tokens = inputs["decoder_input_ids"]
        return ModelInputs(
            tokens=decoder_tokens,
            positions=None,
            mask=inputs.get("decoder_attention_mask"),
            longest=decoder_tokens.shape[1],
            source=tokens,
            source_mask=mask,
        )
    positions = inputs.get("position_ids")
    longest = tokens.shape[1]
    if positions is not None:
        longest = int(positions.max()) + 1
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=mask,
        longest=longest,
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
    mask = token_mask(tokens, attention_mask).long()
    longest = int(mask.sum(-1).max())
    # Padding need not be a token of the vocabulary, but is embedded.
    tokens, mask = _pad_left(tokens * mask, mask)
    tokens = tokens[:, -longest:]
    mask = mask[:, -longest:]
    return ModelInputs(
        tokens=tokens,
        positions=(mask.cumsum(-1) - 1).clamp(min=0),
        mask=None if bool(mask.all()) else mask,
        longest=longest,
    )


def token_mask(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of tokens, [b, s]: 1 for tokens and 0 for padding; without one there is no padding."""
    if mask is None:
        return torch.ones_like(tokens)
    return mask


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
    mask = token_mask(input_ids, attention_mask)
    first = mask.argmax(dim=-1, keepdim=True)
    begins = input_ids.gather(-1, first) == token
    if bool(begins.all()):
        return input_ids, mask
    column = torch.full_like(first, token)
    is_new = (~begins).to(mask.dtype)
    return _pad_left(
        torch.cat((column, input_ids), dim=-1),
        torch.cat((is_new, mask), dim=-1),
    )
