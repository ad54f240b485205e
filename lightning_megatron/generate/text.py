"""Prompts and completions as texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.data.tokenizer_files import panics_as_errors
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.layout import token_mask


def encode_prompts(
    texts: Sequence[str], tokenizer: Any, *, add_bos: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of prompts, [b, s] each, padded on the left.

    Args:
        texts: One or more prompts.
        tokenizer: Of transformers; the special tokens that it adds itself are included.
        add_bos: Whether to prepend the tokenizer's beginning-of-sequence token where it is missing.

    Raises:
        ConfigError: If a prompt has no tokens, or the tokenizer no beginning-of-sequence token.
    """
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise ConfigError(
            "add_bos: expected a tokenizer with a bos_token, got one without; leave it out"
        )
    rows: list[Tensor] = []
    for text in texts:
        with panics_as_errors(getattr(tokenizer, "name_or_path", "tokenizer")):
            row: list[int] = tokenizer.encode(text)
        if add_bos and row[:1] != [bos]:
            row = [bos, *row]
        if not row:
            raise ConfigError(
                f"the prompt {text!r} has no token to continue; give it text, or --add-bos"
            )
        rows.append(torch.tensor(row))
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded(rows), padded([torch.ones_like(row) for row in rows])


def decode_completion(
    tokenizer: Any,
    prompt: Sequence[int],
    new: Sequence[int],
) -> str:
    """Text of the tokens ``new`` after ``prompt``; decoded alone they could lose the space before the first word."""
    prompt_text = tokenizer.decode(list(prompt), skip_special_tokens=True)
    text: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return text[len(prompt_text) :]


def decode_completions(
    tokenizer: Any,
    sequences: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    is_t5: bool = False,
) -> list[str]:
    """Text of each completion, without special tokens.

    Args:
        tokenizer: Of transformers.
        sequences: What ``generate`` returned, [b * n, s + new]: n sequences per prompt.
        input_ids: The prompts, [b, s].
        attention_mask: [b, s]; None for no padding.
        is_t5: Whether the sequences are those of a T5's decoder: [b * n, 1 + new], without the prompts.
    """
    texts: list[str]
    if is_t5:
        texts = tokenizer.batch_decode(sequences[:, 1:], skip_special_tokens=True)
        return texts
    copies = len(sequences) // len(input_ids)
    width = input_ids.shape[1]
    masks = token_mask(input_ids, attention_mask).bool().cpu()
    texts = []
    for index, row in enumerate(sequences.cpu()):
        prompt = row[:width][masks[index // copies]]
        texts.append(decode_completion(tokenizer, prompt.tolist(), row[width:].tolist()))
    return texts
