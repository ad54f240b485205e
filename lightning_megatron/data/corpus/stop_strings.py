"""Which token makes a text complete that ends generation, however the model spells it?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from lightning_megatron.data.corpus.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError, DataError

_laid_out: WeakKeyDictionary[Any, dict[tuple[Any, ...], StopStrings]] = WeakKeyDictionary()
"""What was found out about a tokenizer, which takes a second or two for 128,000 tokens."""

_MOST = 8
"""Sets of texts that are remembered of a tokenizer; the table of one has some megabytes."""

_loaded = functools.lru_cache(maxsize=4)(load_tokenizer)


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStrings:
    """What finds these texts; found out once for each tokenizer and its folder.

    Args:
        strings: The texts.
        tokenizer: Of transformers, or the folder of one.

    Raises:
        ConfigError: If the tokenizer is none, or knows no token that could end one of the texts.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        try:
            tokenizer = _loaded(tokenizer)
        except DataError as error:
            raise ConfigError(str(error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}, and stop_strings need a tokenizer of "
            "transformers, or the folder of one; give that"
        )
    known, key = _laid_out.setdefault(tokenizer, {}), (*strings, len(tokenizer))
    if key not in known:
        if len(known) == _MOST:
            del known[next(iter(known))]
        known[key] = StopStrings(strings, tokenizer)
    return known[key]


class StopStrings:
    """Says of rows of tokens whether their last token completes one of some texts: what they say counts.

    The rules are those of transformers' ``StopStringCriteria``, which does the work, with tensors alone: the device
    never waits for the host.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        """Lay out what each token of the vocabulary has in common with the texts.

        Args:
            strings: The texts.
            tokenizer: Of transformers.

        Raises:
            ConfigError: If the tokenizer knows no token that could end one of the texts.
        """
        from transformers import StopStringCriteria

        try:
            criteria = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:
            raise ConfigError(
                f"stop_strings={list(strings)!r} can be written with no token of the tokenizer; correct them"
            ) from error
        self._ends: Callable[[Tensor, None], Tensor] = criteria
        self.table: Tensor = criteria.embedding_vec
        """[vocabulary, n], int32: what each token has in common with the texts; equal for equal tokenizers."""
        self.num_tokens: int = criteria.maximum_token_len
        """Of how many of its last tokens a row consists that is asked about: one for each letter of the longest."""

    @property
    def largest_token(self) -> int:
        """The last one of the tokenizer."""
        return len(self.table) - 2

    @property
    def no_token(self) -> int:
        """A number that stands for no text at all."""
        return len(self.table) - 1

    def at(self, tokens: Tensor) -> Tensor:
        """Whether the last token of each row makes one of the texts complete: [b], bool.

        Args:
            tokens: [b, s], int64.
        """
        return self._ends(tokens, None)
