"""Which token may look at which, and which count as targets? Pure functions of token tensors."""

from __future__ import annotations

import torch

IGNORE_INDEX = -100
"""Hugging Face's label for "no target here"."""


def document_numbers(tokens: torch.Tensor, eod_token: int) -> torch.Tensor:
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


def joint_segments(documents: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
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
    shifted = torch.full_like(labels, IGNORE_INDEX)
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
    return shift_labels(tokens.masked_fill(is_padding, IGNORE_INDEX)).masked_fill(is_padding, IGNORE_INDEX)
