"""Which prompts can a model not read or not continue? Looked at on the host, before anything runs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.models.config import ModelConfig


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
