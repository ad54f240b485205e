"""Stop strings: rows end with the token that completes one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from transformers import StopStringCriteria


@functools.lru_cache(maxsize=8)
def _stop_criterion(
    strings: tuple[str, ...],
    tokenizer: Any,
    size: int,
) -> StopStringCriteria | None:
    """Stop criterion, which takes a second or two for 128,000 tokens; ``size`` changes when tokens are added.

    None if the tokens cannot write the strings: an error would be found anew in each call.
    """
    # transformers' import takes seconds.
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError:
        return None


def stop_strings(
    strings: Sequence[str],
    tokenizer: Any,
    vocab_size: int,
) -> StopStringCriteria:
    """Stop criterion that finds rows whose last token completes one of the strings, however they are tokenized.

    It works with tensors alone and does not synchronize host and device. It reads the last ``maximum_token_len`` tokens
    of a row, one for each character of the longest string. The last row of its ``embedding_vec``, [vocabulary, n]
    int32, stands for no token.

    Args:
        strings: The stop strings.
        tokenizer: Of transformers, or the directory of one.
        vocab_size: Of the model.

    Raises:
        ConfigError: If the tokenizer is not one of transformers, belongs to another model, or has no token that can end
            one of the strings.
    """
    # transformers' import takes seconds.
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        tokenizer = _load_tokenizer(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"stop_strings: expected a tokenizer of transformers or its directory, got {tokenizer!r}"
        )
    check_vocabulary(tokenizer, tokenizer.name_or_path, vocab_size)
    criterion = _stop_criterion(tuple(strings), tokenizer, len(tokenizer))
    if criterion is None:
        raise ConfigError(
            f"stop_strings={tuple(strings)!r} cannot be written with the tokens of the tokenizer"
        )
    return criterion


_load_tokenizer = functools.lru_cache(maxsize=4)(load_tokenizer)
