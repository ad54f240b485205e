"""The request of a ``generate`` call: prompts, and how new tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.inputs import read_rows
from lightning_megatron.generate.layout import ModelInputs, left_padded, prepend_token
from lightning_megatron.generate.options import GenerationOptions, options_from
from lightning_megatron.generate.special_tokens import SpecialTokens
from lightning_megatron.generate.stop_strings import stop_strings
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.rank_zero import rank_zero_warn
from lightning_megatron.steps.base import Batch

if TYPE_CHECKING:
    from transformers import StopStringCriteria


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts as model inputs, and how new tokens are chosen; the same on all ranks."""

    prefix: Tensor
    """[b, s], int64: tokens that precede the new ones in the result."""
    prompts: ModelInputs
    """Model inputs of all prompts, or of one replica's."""
    options: GenerationOptions
    """As given; the fields below also depend on the model."""
    min_new_tokens: int
    """New tokens of a row before an end-of-sequence token or a stop sequence may end it."""
    max_new_tokens: int
    """Maximum number of new tokens per row."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence tokens."""
    pad_token_id: int
    """Padding token after the end of a row."""
    vocab_size: int
    """Without vocabulary padding."""
    stop_strings: StopStringCriteria | None
    """Stop criterion for stop strings; None if there are none."""
    samples: bool
    """Whether tokens are sampled."""
    can_end: bool
    """Whether rows can end before they have the maximum number of tokens."""


def build_request(
    batch: Batch,
    arguments: Mapping[str, Any],
    model: ModelConfig,
    special: SpecialTokens | None = None,
    on_tokens: object = None,
) -> Request:
    """Build the request of a ``generate`` call and check it. Reads the tensors, which should be on the host.

    Args:
        batch: Prompts by Hugging Face's names. Without a mask there is no padding, except that, as in Hugging Face, the
            model's padding token is padding if it is no end-of-sequence token (transformers 5.23 does this for GPTs
            only; a T5 shall not read padding either).
        arguments: Fields of ``GenerationOptions``; None means not given, as in Hugging Face's ``generate``.
        model: Config of the model.
        special: The model's special tokens.
        on_tokens: Callback for new tokens, if any.

    Raises:
        ConfigError: If an option is wrong, the tensors are not [b, s] of tokens and of 0 and 1, a prompt is empty, a
            token is not in the vocabulary, a sequence would outgrow the position embeddings or the options, or an input
            is not one of the model's.
    """
    options = options_from(arguments, on_tokens)
    special = special or SpecialTokens()
    eos = special.eos
    if options.eos_token_id is not None:
        eos = options.eos_token_ids
    pad = special.pad
    if options.pad_token_id is not None:
        pad = options.pad_token_id
    ids = batch["input_ids"]
    if (
        "attention_mask" not in batch
        and isinstance(ids, Tensor)
        and pad is not None
        and pad not in eos
    ):
        batch = {**batch, "attention_mask": ids.ne(pad).long()}
    rows = read_rows(batch, model, for_generation=True)
    for name, (tokens, mask) in rows.items():
        if mask is not None:
            is_empty = mask.sum(-1) == 0
            if bool(is_empty.any()):
                empty = is_empty.nonzero().flatten().tolist()
                raise ConfigError(
                    f"the prompts {empty} are empty ({name} have padding only); give each a token"
                )
            tokens = tokens.masked_fill(mask == 0, 0)
        _check_in_vocabulary(name, tokens, model)
    for sequence in ((options.bos_token_id or 0,), *options.stop_sequences):
        _check_in_vocabulary("bos_token_id or stop_sequences", torch.tensor(sequence), model)
    criterion = None
    if options.stop_texts:
        criterion = stop_strings(options.stop_texts, options.tokenizer, model.vocab_size)
    start = special.start
    if start is None:
        start = model.decoder_start_token_id
    prefix, prompts = _prefix_and_prompts(batch, options.bos_token_id, start, model)
    limit = None
    if model.has_position_table:
        limit = model.max_position_embeddings
    min_new, max_new = options.new_token_limits(prefix.shape[1], prompts.longest, limit)
    _warn_beyond_trained_positions(prompts.longest, max_new, model)
    padding = [token for token in (pad, *eos) if token is not None]
    return Request(
        prefix=prefix,
        prompts=prompts,
        options=options,
        min_new_tokens=min_new,
        max_new_tokens=max_new,
        eos_token_ids=eos,
        pad_token_id=padding[0] if padding else 0,
        vocab_size=model.vocab_size,
        stop_strings=criterion,
        samples=options.samples,
        can_end=bool(eos or options.stop_sequences or criterion),
    )


def _prefix_and_prompts(
    inputs: Batch, bos: int | None, start: int, model: ModelConfig
) -> tuple[Tensor, ModelInputs]:
    """Tokens that precede the new ones in the result, [b, s], and the prompts as model inputs.

    As in Hugging Face's ``generate``, ``start`` is prepended to the prompts of a T5's decoder if none begins with it.
    """
    if model.architecture != "t5":
        prefix = inputs["input_ids"].long()
        mask = inputs.get("attention_mask")
        if bos is not None:
            prefix, mask = prepend_token(prefix, mask, bos)
        return prefix, left_padded(prefix, mask)
    if bos is not None:
        raise ConfigError(
            f"bos_token_id={bos} is for prompts of GPTs; give the decoder_input_ids of a T5"
        )
    start_column = torch.full((len(inputs["input_ids"]), 1), start)
    mask = inputs.get("decoder_attention_mask")
    prefix = inputs.get("decoder_input_ids", start_column).long()
    if bool((prefix[:, 0] != start).all()):
        prefix = torch.cat((start_column, prefix), dim=-1)
        if mask is not None:
            is_token = torch.ones_like(mask[:, :1])
            mask = torch.cat((is_token, mask), dim=-1)
    # Padding of the source need not be in the vocabulary either.
    source = inputs["input_ids"].long()
    prompts = left_padded(prefix, mask)
    source_mask = inputs.get("attention_mask")
    if source_mask is None or bool(source_mask.all()):
        return prefix, replace(prompts, source=source)
    source_mask = source_mask.long()
    return prefix, replace(prompts, source=source * source_mask, source_mask=source_mask)


def _warn_beyond_trained_positions(longest: int, max_new: int, model: ModelConfig) -> None:
    """Warn once of rows longer than those that a model with rotary positions was trained on: it computes any length."""
    trained = model.max_position_embeddings
    if model.position_embedding_type != "rope" or not trained or longest + max_new <= trained:
        return
    rank_zero_warn(
        f"a prompt of {longest} tokens and max_new_tokens={max_new} go beyond the model's max_position_embeddings="
        f"{trained}: expect poor tokens from there on; use max_new_tokens of at most {max(trained - longest, 0)}, or a "
        "model for longer texts"
    )


def _check_in_vocabulary(name: str, tokens: Tensor, model: ModelConfig) -> None:
    is_wrong = (tokens < 0) | (tokens >= model.vocab_size)
    if bool(is_wrong.any()):
        raise ConfigError(
            f"{name}: expected tokens of the vocabulary, 0 to {model.vocab_size - 1}, got {tokens[is_wrong][0]}"
        )
