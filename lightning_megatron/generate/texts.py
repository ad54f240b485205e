"""Text on both sides of generation: prompts to tokens, tokens to text, special tokens of a model, stop strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.convert.hugging_face import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import StopStringCriteria


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
            raise ConfigError(f"the prompt {text!r} has no token to continue; give it text, or --add-bos")
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded([torch.tensor(row) for row in rows]), padded([torch.ones(len(row), dtype=torch.long) for row in rows])


def continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the tokens ``new`` as it reads behind ``prompt``: the space between words is often the latter's."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return whole[len(before) :]


def new_texts(
    tokenizer: Any, written: Tensor, input_ids: Tensor, attention_mask: Tensor | None, *, is_answer: bool = False
) -> list[str]:
    """What was written to each prompt, special tokens left out.

    Args:
        tokenizer: Of transformers.
        written: What ``generate`` returned, [b * n, s + new]: n texts of each prompt.
        input_ids: The prompts that it was given, [b, s].
        attention_mask: [b, s]; None for no padding.
        is_answer: Whether it is the decoder of a T5 that has written: [b * n, 1 + new], without the prompts.
    """
    if is_answer:
        texts: list[str] = tokenizer.batch_decode(written[:, 1:], skip_special_tokens=True)
        return texts
    copies, width = len(written) // len(input_ids), input_ids.shape[1]
    masks = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
    return [
        continuation(tokenizer, row[:width][masks[index // copies]].tolist(), row[width:].tolist())
        for index, row in enumerate(written.cpu())
    ]


# ---- special tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """What a model's own files say about the ends of a text."""

    eos: tuple[int, ...] = ()
    """Tokens that end it."""
    pad: int | None = None
    """What fills rows that ended before others."""
    start: int | None = None
    """What a decoder apart from an encoder reads first; None if only the model's config says so."""


def end_tokens(model: HFConfigLike) -> EndTokens:
    """Those that Hugging Face's ``generate`` takes where a call names none.

    They are those of ``generation_config.json``, or without that file those of the config.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is no JSON object.
    """
    file = Path(model) / GENERATION_CONFIG_FILE if isinstance(model, (str, Path)) else None
    start: int | None = None
    if file is not None and file.is_file():
        fields = read_json(file)
        # In Hugging Face's order of precedence (transformers 5.23, generation/utils.py, _prepare_special_tokens).
        start = fields.get("decoder_start_token_id")
        start = fields.get("bos_token_id") if start is None else start
    else:
        fields = {name: getattr(config_object(model), name, None) for name in ("eos_token_id", "pad_token_id")}
    eos = fields.get("eos_token_id")
    several = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return EndTokens(eos=several, pad=fields.get("pad_token_id"), start=start)


# ---- stop strings ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _criteria(strings: tuple[str, ...], tokenizer: Any, size: int) -> StopStringCriteria:
    """Takes a second or two for 128,000 tokens; ``size`` changes when tokens are added."""
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ConfigError(f"stop_strings={strings!r} can be written with no token of the tokenizer") from error


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStringCriteria:
    """What says of rows of tokens whether their last token completes one of the texts, however they are spelled.

    It works with tensors alone: the device never waits for the host. It asks about the last ``maximum_token_len``
    tokens of a row, one for each letter of the longest text. The last row of its ``embedding_vec``, [vocabulary, n]
    int32, stands for no token at all.

    Args:
        strings: The texts.
        tokenizer: Of transformers, or the folder of one.

    Raises:
        ConfigError: If the tokenizer is none, or knows no token that could end one of the texts.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        tokenizer = _loaded(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"stop_strings: expected a tokenizer of transformers or its folder, got {tokenizer!r}")
    return _criteria(tuple(strings), tokenizer, len(tokenizer))


_loaded = functools.lru_cache(maxsize=4)(load_tokenizer)
