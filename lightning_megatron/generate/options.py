"""How shall tokens be chosen, and when is a text finished? ``GenerationOptions``, checked before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import advice, explains_options
from lightning_megatron.generate.option_checks import check_options

DEFAULT_NEW_TOKENS = 20
"""Tokens that a row gets at most if nobody says how many."""

_LARGEST_POWER_OF_TEN = 37
"""Numbers up to its power of ten, and their reciprocals, are float32 of full precision, in which texts are scored."""


@explains_options
@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of ``MegatronModule.generate``, named as in Hugging Face's ``generate`` and in Megatron's server.

    Greedy unless something says to sample. Nothing is taken from a model's ``generation_config.json`` but the tokens
    that end and pad a text, and nothing is switched on silently (Hugging Face samples from the 50 likeliest tokens).
    """

    max_new_tokens: int | None = None
    """How many tokens a row gets at most; None for what ``max_length`` leaves, else for 20, or as many as the model has
    positions for."""
    max_length: int | None = None
    """How many tokens a row has at most, the prompts' columns (of a T5 the decoder's) included."""
    min_new_tokens: int = 0
    """No token of ``eos_token_id`` is chosen, and no stop sequence ends a row, before it has so many new tokens."""
    min_length: int = 0
    """As ``min_new_tokens``, counted as ``max_length``."""
    do_sample: bool | None = None
    """Draw tokens at random; False takes the likeliest; None samples if temperature, top_k, top_p or min_p are set."""
    temperature: float = 1.0
    """Logits are divided by it; in (0, 100]."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens only; 0 for all."""
    top_p: float = 0.0
    """Draw from the likeliest tokens that together have at least this probability; 0 for all."""
    top_p_decay: float = 0.0
    """After each token ``top_p`` is multiplied by this; 0 leaves it."""
    top_p_bound: float = 0.0
    """Below this ``top_p`` does not decay."""
    min_p: float = 0.0
    """Draw from the tokens that have at least this part of the likeliest one's probability; 0 for all."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that a row has already are divided by it, negative ones multiplied."""
    no_repeat_ngram_size: int = 0
    """No run of so many tokens comes twice in a row, its prompt (of a T5 the decoder's) included; 0 allows all."""
    num_return_sequences: int = 1
    """Texts per prompt, one after the other in the result: drawn, or the best of the beams."""
    num_beams: int = 1
    """Keep so many beginnings of each text, and find one that is likely as a whole; 1 for none of this."""
    length_penalty: float = 1.0
    """Beams: the sum of a text's log-probabilities is divided by its number of tokens to the power of this."""
    early_stopping: bool | Literal["never"] = False
    """Beams: True ends a search when ``num_beams`` texts are complete; False when no better one is to be expected from
    the length so far; ``never`` when none is possible."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Tokens that end a row; None for the model's own, () for none."""
    pad_token_id: int | None = None
    """What fills rows that ended before others; None for the model's own, else the first that ends a row."""
    bos_token_id: int | None = None
    """Put before each prompt that does not begin with it; the result has it, too (Megatron's ``add_BOS``)."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Runs of new tokens that end a row; they stay in it."""
    stop_strings: str | tuple[str, ...] = ()
    """Texts that end a row with the token that completes one, however they are spelled, across the end of the prompt,
    too; ``min_new_tokens`` does not hold them back. As in Hugging Face's ``generate``, with ``tokenizer``."""
    tokenizer: Any = field(default=None, repr=False, compare=False)
    """What tells ``stop_strings`` how tokens read: a tokenizer of transformers, or the folder of one."""
    seed: int = 0
    """The same prompts, options and seed give the same text on every layout."""
    static_cache: bool | None = None
    """Caches of a fixed size: every step has the same shapes, and a GPU replays it as a CUDA graph from the third token
    on. Not for T5s and for ``dynamic`` and ``longrope`` rotary scaling. None: on GPUs, where it is possible and there
    are tokens enough to gain by it."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: If a number is out of range, or two options contradict each other.
        """
        check_options(self)

    @property
    def shapes_distribution(self) -> bool:
        """Whether something says how tokens are drawn."""
        return self.temperature != 1.0 or self.top_k > 0 or self.top_p > 0.0 or self.min_p > 0.0

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self.shapes_distribution if self.do_sample is None else self.do_sample

    def top_p_at(self, step: int) -> float:
        """``top_p`` for the new token number ``step``, from 0.

        Megatron-LM, text generation: the first token is drawn with the whole ``top_p``, which then decays.
        """
        if self.top_p_decay == 0.0:
            return self.top_p
        return max(self.top_p * self.top_p_decay**step, self.top_p_bound)

    def settled(self, width: int, room: int | None = None) -> GenerationOptions:
        """The same with every length counted in new tokens.

        Args:
            width: Columns of the prompts; of a T5 those of the decoder.
            room: Positions that a model has behind the longest prompt; None if it has no table of them.

        Raises:
            ConfigError: If nothing is left for new tokens, a text must be longer than it may, or beams would weigh its
                length by a number that float32 does not hold.
        """
        if self.max_length is not None:
            most = self.max_length - width
            if most < 1:
                raise ConfigError(
                    f"max_length={self.max_length} leaves nothing for new tokens behind prompts of {width} (padding "
                    "counts, too); raise it, or give max_new_tokens in its place"
                )
        elif self.max_new_tokens is not None:
            most = self.max_new_tokens
        else:
            most = DEFAULT_NEW_TOKENS if room is None else min(DEFAULT_NEW_TOKENS, max(room, 1))
        least = max(self.min_new_tokens, self.min_length - width)
        if least > most:
            name = f"min_length={self.min_length}" if self.min_length > 0 else f"min_new_tokens={self.min_new_tokens}"
            raise ConfigError(
                f"{name} asks for {least} new tokens or more, and a row of {width} gets {most} at most; give a larger "
                f"{'max_new_tokens' if self.max_length is None else 'max_length'}"
            )
        if abs(self.length_penalty) * math.log10(most) > _LARGEST_POWER_OF_TEN:
            raise ConfigError(
                f"length_penalty={self.length_penalty} weighs texts of up to {most} tokens by {most} to the power of "
                f"it, which is no float32; use at most {_LARGEST_POWER_OF_TEN / math.log10(most):.0f} of either sign"
            )
        return replace(self, max_new_tokens=most, max_length=None, min_new_tokens=max(least, 0), min_length=0)

    @property
    def num_new_tokens(self) -> int:
        """``max_new_tokens`` once they are ``settled``."""
        assert self.max_new_tokens is not None
        return self.max_new_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a row."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a row."""
        if self.eos_token_id is None:
            return ()
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else tuple(self.eos_token_id)

    @property
    def filling(self) -> int:
        """What stands behind the end of a row."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        return self.eos_token_ids[0] if self.eos_token_ids else 0


def options_from(arguments: dict[str, Any]) -> GenerationOptions:
    """Options from keyword arguments.

    Raises:
        ConfigError: If a name is unknown, or ``GenerationOptions`` refuses a value.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(GenerationOptions)}
    for name in arguments:
        if name not in defaults:
            raise ConfigError(f"generate has no option {name!r}; {advice(name, list(defaults))}")
    try:
        # As in Hugging Face's generate, None is what nobody has said anything about.
        return GenerationOptions(**{k: defaults[k] if v is None else v for k, v in arguments.items()})
    except TypeError as error:
        raise ConfigError(f"an option of generate has the wrong type: {error}") from error
