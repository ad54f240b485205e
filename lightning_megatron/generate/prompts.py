"""What do rows of unequal length look like to the model? Tokens on the right, padding on the left, positions from 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Rows that all end at the same place, so that each new token of all rows has one place in the cache."""

    tokens: Tensor
    """[b, s], int64; padding on the left."""
    lengths: Tensor
    """[b], int64: tokens of each row."""
    is_padded: bool
    """Whether any row has padding."""
    longest: int
    """Tokens of the longest row of the whole call, of which these rows may be a part."""
    source: Tensor | None = None
    """What an encoder reads: [b, s_enc], int64; None for models without one."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source; None for no padding."""

    @property
    def is_token(self) -> Tensor:
        """[b, s], int64: 1 for tokens, 0 for padding."""
        width = self.tokens.shape[1]
        return (torch.arange(width, device=self.tokens.device) >= width - self.lengths[:, None]).long()

    @property
    def positions(self) -> Tensor:
        """[b, s], int64: each row counts its own tokens from 0."""
        return (self.is_token.cumsum(-1) - 1).clamp(min=0)

    def rows(self, some: slice) -> Prompts:
        """Some of the rows."""
        return self._each(lambda tensor: tensor[some])

    def repeated(self, times: int) -> Prompts:
        """Each row so many times, one after the other."""
        return self._each(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def to(self, device: torch.device) -> Prompts:
        """The same on ``device``."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Prompts:
        tensors: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


def aligned(input_ids: Tensor, attention_mask: Tensor | None) -> Prompts:
    """Prompts as the model reads them, wherever their padding was.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
    """
    tokens = input_ids.long()
    rows, width = tokens.shape
    if attention_mask is None:
        return Prompts(tokens=tokens, lengths=tokens.new_full((rows,), width), is_padded=False, longest=width)
    mask = attention_mask.long()
    lengths = mask.sum(-1)
    longest, shortest = int(lengths.max()), int(lengths.min())
    tokens_last = mask.argsort(dim=-1, stable=True)
    # What stands for padding need not be a token of the vocabulary, and the embedding is asked for it.
    tokens = (tokens * mask).gather(-1, tokens_last)[:, width - longest :]
    return Prompts(tokens=tokens, lengths=lengths, is_padded=shortest < longest, longest=longest)


def with_first_token(input_ids: Tensor, attention_mask: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """The rows with ``token`` before the first of their own, if not all of them begin with it already.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding on any side; None for no padding.
        token: What texts begin with.

    Returns:
        Tokens and mask, [b, s + 1]; of a row that begins with ``token`` the new column is padding. Or what was given.
    """
    rows, width = input_ids.shape
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    first = mask.argmax(dim=-1, keepdim=True)
    begins = input_ids.gather(-1, first) == token
    if bool(begins.all()):
        return input_ids, attention_mask
    places = torch.arange(width + 1, device=input_ids.device).expand(rows, -1)
    sources = (places - (places > first).long()).clamp(max=width - 1)
    tokens, mask = input_ids.gather(-1, sources), mask.gather(-1, sources)
    tokens.scatter_(-1, first, token)
    mask.scatter_(-1, first, (~begins).to(mask.dtype))
    return tokens, mask


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a caller has given; on the host once ``on_host`` was asked."""

    input_ids: Tensor
    """[b, s]."""
    attention_mask: Tensor | None = None
    """[b, s], 1 for tokens and 0 for padding on any side; None if there is none."""
    decoder_input_ids: Tensor | None = None
    """[b, s_dec], what the decoder of an encoder-decoder shall continue; None for its start token alone."""
    decoder_attention_mask: Tensor | None = None
    """[b, s_dec], the same for the decoder."""

    def on_host(self) -> Given:
        """The same on the CPU; what is no tensor is left for the checks."""
        return Given(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in vars(self).items()})
