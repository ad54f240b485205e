"""How do texts become rows of tokens, and how does what a model wrote become text again?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError


def encoded(texts: Sequence[str], tokenizer: Any, *, add_bos: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of the texts, [b, s] each, with padding on the left.

    Args:
        texts: One or more.
        tokenizer: Of transformers; the special tokens that it adds itself are among the tokens.
        add_bos: Whether each text shall begin with the tokenizer's first token.

    Raises:
        ConfigError: If a text has no token, or the tokenizer no first token.
    """
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise ConfigError("the tokenizer has no first token of texts (bos_token) to put before prompts; leave it out")
    rows: list[list[int]] = [tokenizer.encode(text) for text in texts]
    if add_bos:
        rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ConfigError(
                f"the prompt {text!r} has no token to continue; give it some text, or a first token (--add-bos)"
            )
    width = max((len(row) for row in rows), default=0)
    return (
        torch.tensor([[0] * (width - len(row)) + row for row in rows], dtype=torch.long),
        torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], dtype=torch.long),
    )


def continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the tokens ``new`` as it reads behind ``prompt``: the space between words is often the latter's."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return whole[len(before) :]


def new_texts(tokenizer: Any, written: Tensor, input_ids: Tensor, attention_mask: Tensor | None) -> list[str]:
    """What follows each prompt, special tokens left out.

    Args:
        tokenizer: Of transformers.
        written: What ``generate`` of a GPT returned, [b * n, s + new]: n texts of each prompt.
        input_ids: The prompts that it was given, [b, s].
        attention_mask: [b, s]; None for no padding.
    """
    copies, width = len(written) // len(input_ids), input_ids.shape[1]
    masks = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
    return [
        continuation(tokenizer, row[:width][masks[index // copies]].tolist(), row[width:].tolist())
        for index, row in enumerate(written.cpu())
    ]


def decoder_texts(tokenizer: Any, written: Tensor) -> list[str]:
    """What an encoder-decoder wrote, special tokens left out.

    Args:
        tokenizer: Of transformers.
        written: What ``generate`` returned, [b, 1 + new].
    """
    texts: list[str] = tokenizer.batch_decode(written[:, 1:], skip_special_tokens=True)
    return texts
