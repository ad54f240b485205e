"""Which token may look at which, and which count as targets? Pure functions of token tensors."""

from __future__ import annotations

import torch

IGNORE_INDEX = -100
"""Hugging Face's label for "no target here"."""


def causal_padding_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Who is hidden from whom in a causal model with padding.

    Every token sees itself, padding too: a row that sees nothing would turn into NaN and spread.

    Args:
        attention_mask: [b, s], 1 for tokens and 0 for padding.

    Returns:
        [b, 1, s, s], bool, True where the query (third axis) may not see the key (fourth axis): Megatron's convention.
    """
    seq_length = attention_mask.shape[1]
    future = torch.ones(seq_length, seq_length, dtype=torch.bool, device=attention_mask.device).triu(1)
    hidden = future | (attention_mask == 0)[:, None, None, :]
    return hidden & ~torch.eye(seq_length, dtype=torch.bool, device=attention_mask.device)


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """The target of each position when labels stand at the positions of the tokens themselves.

    Args:
        labels: [b, s], ``IGNORE_INDEX`` where there is no target.

    Returns:
        [b, s]: the label one to the right; the last position has none.
    """
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[:, :-1] = labels[:, 1:]
    return shifted
