"""What do rows of unequal length look like to the model? Tokens on the right, padding on the left, positions from 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.models.config import ModelConfig


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


def check_prompts(
    input_ids: Tensor, attention_mask: Tensor | None, model: ModelConfig, options: GenerationOptions
) -> None:
    """Refuse what the model cannot continue. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: If the tensors are no [b, s] of tokens and of 0 and 1, a prompt is empty, a token is not in the
            vocabulary, or the text would outgrow the table of positions or what the options allow.
    """
    check_readable(input_ids, attention_mask, model.vocab_size)
    if model.architecture != "t5":  # whose decoder continues something else
        check_length(input_ids, attention_mask, model, options)


def check_readable(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, name: str = "input_ids") -> None:
    """Refuse what are no rows of tokens. Reads the tensors, which should be on the host.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s]; None for no padding.
        vocab_size: Of the model.
        name: What the caller calls the tokens.

    Raises:
        ConfigError: If the tensors are no [b, s] of tokens and of 0 and 1, a row is empty, or a token is not in the
            vocabulary.
    """
    _check_tensor(input_ids, name)
    if attention_mask is not None:
        _check_mask(input_ids, attention_mask, name)
        empty = (attention_mask.sum(-1) == 0).nonzero().flatten().tolist()
        if empty:
            raise ConfigError(f"the prompts {empty} are empty ({name} have padding only); give each a token")
    real = input_ids if attention_mask is None else input_ids[attention_mask == 1]
    check_tokens(name, (int(real.min()), int(real.max())), vocab_size)


def check_length(
    input_ids: Tensor, attention_mask: Tensor | None, model: ModelConfig, options: GenerationOptions
) -> GenerationOptions:
    """The options with the lengths that these prompts leave; of a T5 what its decoder continues.

    Raises:
        ConfigError: If the text would outgrow the table of positions or what the options allow.
    """
    width, limit = input_ids.shape[1], model.max_position_embeddings
    if model.position_embedding_type != "learned_absolute":
        return options.settled(width)
    longest = width if attention_mask is None else int(attention_mask.sum(-1).max())
    room = limit + 1 - longest  # the last new token is not read again
    settled = options.settled(width, room)
    if settled.num_new_tokens <= room:
        return settled
    if room < 1:
        raise ConfigError(
            f"a prompt of {longest} tokens needs more positions than the model's max_position_embeddings={limit}; cut "
            f"the prompts to {limit} tokens"
        )
    name, most = ("max_new_tokens", room) if options.max_length is None else ("max_length", width + room)
    raise ConfigError(
        f"a prompt of {longest} tokens and {name}={getattr(options, name)} need more positions than the model's "
        f"max_position_embeddings={limit}; use {name} of at most {most}"
    )


def check_rows(input_ids: Tensor, attention_mask: Tensor | None, model: ModelConfig, name: str = "input_ids") -> None:
    """Refuse what the model cannot read. Reads the tensors, which should be on the host.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
        model: What reads them.
        name: What the caller calls the tokens.

    Raises:
        ConfigError: If the tensors are no [b, s] of tokens and of 0 and 1, a token (of padding, too) is not in the
            vocabulary, or the rows are longer than the table of positions.
    """
    _check_tensor(input_ids, name)
    if attention_mask is not None:
        _check_mask(input_ids, attention_mask, name)
    check_tokens(name, (int(input_ids.min()), int(input_ids.max())), model.vocab_size)
    length, limit = input_ids.shape[1], model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and length > limit:
        raise ConfigError(
            f"{name} have {length} tokens per row, more than the model's max_position_embeddings={limit}; cut them"
        )


def check_tokens(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        ConfigError: With the first one.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{name} has the token {token}, and the model's vocabulary is 0..{vocab_size - 1}; does the tokenizer "
                "belong to the model?"
            )


def _check_tensor(input_ids: Tensor, name: str = "input_ids") -> None:
    if not isinstance(input_ids, Tensor):
        raise ConfigError(f"{name} are {_kind(input_ids)}; give a tensor of integers, [prompts, tokens]")
    if input_ids.dim() != 2 or input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise ConfigError(
            f"{name} are {list(input_ids.shape)} {input_ids.dtype}; give a tensor of integers, [prompts, tokens]"
        )
    if input_ids.numel() == 0:
        raise ConfigError(f"{name} have the shape {list(input_ids.shape)}; give at least one prompt of one token")


def _check_mask(input_ids: Tensor, attention_mask: Tensor, name: str = "input_ids") -> None:
    mask_name = name.replace("input_ids", "attention_mask")
    if not isinstance(attention_mask, Tensor):
        raise ConfigError(f"{mask_name} is {_kind(attention_mask)}; give a tensor of 0 and 1, [prompts, tokens]")
    if attention_mask.shape != input_ids.shape:
        shape = list(attention_mask.shape)
        raise ConfigError(
            f"{mask_name} has the shape {shape} and {name} {list(input_ids.shape)}; give each token one number"
        )
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ConfigError(f"{mask_name} has other numbers than 0 and 1; give 1 for tokens and 0 for padding")


def _kind(thing: object) -> str:
    return "None" if thing is None else f"no tensor but a {type(thing).__name__}"
