"""Options of generation, by Hugging Face's names: ``GenerationOptions``, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import advice, explains_options

DEFAULT_NEW_TOKENS = 20
"""Tokens that a row gets at most if nobody says how many."""

_LARGEST_POWER_OF_TEN = 37
"""Numbers up to its power of ten, and their reciprocals, are float32 of full precision, in which texts are scored."""

_LEAST = {
    **{"max_new_tokens": 1, "max_length": 2, "min_new_tokens": 0, "min_length": 0, "top_k": 0},
    **{"no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1},
}
"""Integers, and what they are at least."""

_RANGES = {
    **dict.fromkeys(("top_p", "top_p_decay", "top_p_bound", "min_p"), (0.0, 1.0)),
    # Logits that are divided by less may leave float32, and what is drawn from no numbers would be the last token.
    "temperature": (1e-30, 100.0),
    "repetition_penalty": (1e-30, 1e30),
    "length_penalty": (-1e3, 1e3),
}
"""Numbers, and from what to what they may be."""


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
    """Draw from the likeliest tokens (after ``top_k``) that together have at least this probability; 0 for all."""
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
        self._check_numbers()
        self._check_ends()
        for is_wrong, what in self._contradictions():
            if is_wrong:
                raise ConfigError(what)

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
        if not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed!r} must be an integer of at most 64 bits")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name}={value!r} must be a number from {low:g} to {high:g}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")

    def _check_ends(self) -> None:
        eos: Any = self.eos_token_id
        several = isinstance(eos, Sequence) and not isinstance(eos, str)
        if eos is not None and not all(map(_is_integer, eos if several else (eos,))):
            raise ConfigError(f"eos_token_id={eos!r} must be an integer, or a tuple of them")
        sequences = self.stop_sequences
        are_sequences = isinstance(sequences, Sequence) and all(
            isinstance(x, Sequence) and not isinstance(x, str) and len(x) > 0 and all(map(_is_integer, x))
            for x in sequences
        )
        if not are_sequences:
            raise ConfigError(
                f"stop_sequences={sequences!r} must be tuples of integers in a tuple, none of them empty (texts are "
                "stop_strings)"
            )
        if not isinstance(self.stop_strings, (str, Sequence)) or not all(isinstance(x, str) for x in self.stop_texts):
            raise ConfigError(f"stop_strings={self.stop_strings!r} are no texts; give one, or a tuple of them")
        if "" in self.stop_texts and self.stop_strings != ():
            raise ConfigError("stop_strings has an empty text, which every text ends with; remove it")
        if self.stop_texts and self.tokenizer is None:
            raise ConfigError(
                f"stop_strings={self.stop_strings!r} cannot be found without a tokenizer, which knows how tokens read; "
                "give tokenizer, too"
            )

    def _contradictions(self) -> list[tuple[bool, str]]:
        """What no two options may say together: whether they do, and what to tell."""
        o, drawing, is_search = self, self._how_to_draw(), self.num_beams > 1
        most, whole, least, least_whole = o.max_new_tokens, o.max_length, o.min_new_tokens, o.min_length
        twice = "both say how long a text is, without and with its prompt; give one of them"
        return [
            (most is not None and whole is not None, f"max_new_tokens={most} and max_length={whole} {twice}"),
            (least > 0 and least_whole > 0, f"min_new_tokens={least} and min_length={least_whole} {twice}"),
            (
                most is not None and least > most,
                f"min_new_tokens={least} is more than max_new_tokens={most}; raise the latter",
            ),
            (
                whole is not None and least_whole > whole,
                f"min_length={least_whole} is more than max_length={whole}; raise the latter",
            ),
            (o.top_p_decay > 0 and o.top_p == 0, f"top_p_decay={o.top_p_decay} has no top_p to shrink; give top_p"),
            (
                o.top_p_bound > 0 and o.top_p_decay == 0,
                f"top_p_bound={o.top_p_bound} bounds no decay; give top_p_decay",
            ),
            (o.top_p_bound > o.top_p, f"top_p_bound={o.top_p_bound} is above top_p={o.top_p}; lower it"),
            (
                o.do_sample is False and drawing != "",
                f"do_sample=False takes the likeliest token, and {drawing} says how to draw; leave it out, or set "
                "do_sample=True",
            ),
            (
                is_search and o.samples,
                f"num_beams={o.num_beams} searches for the likeliest text, and {drawing} draws one; use one of the two",
            ),
            (
                is_search and o.num_return_sequences > o.num_beams,
                f"num_return_sequences={o.num_return_sequences} is more than num_beams={o.num_beams} find; raise "
                "num_beams",
            ),
            (not is_search and o.length_penalty != 1, f"length_penalty={o.length_penalty} is for beams; set num_beams"),
            (
                not is_search and bool(o.early_stopping),
                f"early_stopping={o.early_stopping} is for beams; set num_beams",
            ),
            (
                not is_search and o.num_return_sequences > 1 and not o.samples,
                f"num_return_sequences={o.num_return_sequences} would all be the same text; set do_sample=True, or "
                "num_beams",
            ),
        ]

    def _how_to_draw(self) -> str:
        """What the user wrote to have tokens drawn; not what changes nothing if they are not."""
        harmless = {"do_sample": (None, False), "temperature": (1.0,), "top_k": (0,), "top_p": (0.0,), "min_p": (0.0,)}
        if self.do_sample is False:
            harmless["top_p"] = (0.0, 1.0)
        given = [name for name, values in harmless.items() if getattr(self, name) not in values]
        return " and ".join(f"{name}={getattr(self, name)}" for name in given)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        shapes = self.temperature != 1.0 or self.top_k > 0 or self.top_p > 0.0 or self.min_p > 0.0
        return shapes if self.do_sample is None else self.do_sample

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


def options_from(arguments: dict[str, Any], on_tokens: object = None) -> GenerationOptions:
    """Options from keyword arguments.

    Args:
        arguments: Fields of ``GenerationOptions``.
        on_tokens: What shall be called with each new token, if anything.

    Raises:
        ConfigError: If a name is unknown, ``GenerationOptions`` refuses a value, or nothing can be shown while a text
            grows.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(GenerationOptions)}
    for name in arguments:
        if name not in defaults:
            raise ConfigError(f"generate has no option {name!r}; {advice(name, list(defaults))}")
    # As in Hugging Face's generate, None is what nobody has said anything about.
    options = GenerationOptions(**{k: defaults[k] if v is None else v for k, v in arguments.items()})
    if on_tokens is not None and not callable(on_tokens):
        raise ConfigError(f"on_tokens must be callable, got {on_tokens!r}")
    if on_tokens is not None and options.num_beams > 1:
        raise ConfigError(
            f"on_tokens shows texts while they grow, and a search with num_beams={options.num_beams} knows none before "
            "its end; leave one of them out"
        )
    return options


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
