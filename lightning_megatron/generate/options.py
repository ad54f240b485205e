"""Options of generation, by Hugging Face's names: ``GenerationOptions``, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import explains_options

DEFAULT_NEW_TOKENS = 20
"""Tokens that a row gets at most if nobody says how many."""

_PYTHON_ONLY: Any = {"flag": ""}
"""Metadata of fields that are no options of the command ``generate``."""

_RANGES: dict[str, tuple[float, float]] = {
    **{"max_new_tokens": (1, math.inf), "max_length": (2, math.inf), "num_beams": (1, math.inf)},
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k", "no_repeat_ngram_size"), (0, math.inf)),
    **{"num_return_sequences": (1, math.inf), "seed": (-(2**63), 2**64 - 1)},
    **dict.fromkeys(("top_p", "top_p_decay", "top_p_bound", "min_p"), (0, 1)),
    # Logits that are divided by less may leave float32, and what is drawn from no numbers would be the last token.
    **{"temperature": (1e-30, 100), "repetition_penalty": (1e-30, 1e30)},
    # Texts of 4096 tokens, weighed by that to the power of this, still have scores in float32.
    "length_penalty": (-10, 10),
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
    """New tokens of a row, at most (default: what ``max_length`` leaves, or 20, or as many as there are positions)."""
    max_length: int | None = None
    """Tokens of a row, at most, the prompts' columns (of a T5 the decoder's) included."""
    min_new_tokens: int = 0
    """No token that ends texts is chosen, and no stop sequence ends a row, before it has so many new tokens."""
    min_length: int = 0
    """As ``min_new_tokens``, counted as ``max_length``."""
    do_sample: bool | None = field(default=None, metadata={"flag": "--sample"})
    """Draw tokens at random, or take the likeliest (default: random if temperature, top_k, top_p or min_p are set)."""
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
    early_stopping: bool | Literal["never"] = field(default=False, metadata=_PYTHON_ONLY)
    """Beams: True ends a search when ``num_beams`` texts are complete; False when no better one is to be expected from
    the length so far; ``never`` when none is possible."""
    eos_token_id: int | tuple[int, ...] | None = field(default=None, metadata=_PYTHON_ONLY)
    """Tokens that end a row; None for the model's own, () for none."""
    pad_token_id: int | None = field(default=None, metadata=_PYTHON_ONLY)
    """What fills rows that ended before others; None for the model's own, else the first that ends a row."""
    bos_token_id: int | None = field(default=None, metadata=_PYTHON_ONLY)
    """Put before each prompt that does not begin with it; the result has it, too (Megatron's ``add_BOS``)."""
    stop_sequences: tuple[tuple[int, ...], ...] = field(default=(), metadata=_PYTHON_ONLY)
    """Runs of new tokens that end a row; they stay in it."""
    stop_strings: str | tuple[str, ...] = field(default=(), metadata={"flag": "--stop"})
    """Texts that end a row with the token that completes one, however they are spelled, across the end of the prompt,
    too; ``min_new_tokens`` does not hold them back. As in Hugging Face's ``generate``, with a tokenizer."""
    tokenizer: Any = field(default=None, repr=False, compare=False, metadata=_PYTHON_ONLY)
    """What tells ``stop_strings`` how tokens read: a tokenizer of transformers, or the folder of one."""
    seed: int = 0
    """The same prompts, options and seed give the same text on every layout."""
    static_cache: bool | None = None
    """Caches of a fixed size: every step has the same shapes, and a GPU replays it as a CUDA graph from the third token
    on. Not for T5s and for ``dynamic`` and ``longrope`` rotary scaling (default: on GPUs, where it is possible and
    there are tokens enough to gain by it)."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: If a number is out of range, or two options contradict each other.
        """
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                what = f"at least {low}" if high == math.inf else f"from {low:g} to {high:g}"
                raise ConfigError(f"{name}={value!r} must be a number {what}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping={self.early_stopping!r} must be True, False or 'never'")
        runs = self.stop_sequences
        are_runs = isinstance(runs, Sequence) and all(isinstance(run, Sequence) and len(run) > 0 for run in runs)
        if not are_runs or not all(isinstance(token, int) for run in (self.eos_token_ids, *runs) for token in run):
            raise ConfigError(
                f"eos_token_id={self.eos_token_id!r}, stop_sequences={runs!r}: expected integers, and tuples of them"
            )
        are_texts = isinstance(self.stop_strings, Sequence)
        if not are_texts or not all(isinstance(text, str) and text for text in self.stop_texts):
            raise ConfigError(f"stop_strings={self.stop_strings!r} must be a text or a tuple of texts, not empty")
        for is_wrong, what in self._contradictions():
            if is_wrong:
                raise ConfigError(what)

    def _contradictions(self) -> list[tuple[bool, str]]:
        """What no two options may say together: whether they do, and what to tell."""
        o, drawing, is_search = self, self._drawing or "do_sample=True", self.num_beams > 1
        most, whole, least, least_whole = o.max_new_tokens, o.max_length, o.min_new_tokens, o.min_length
        twice = "both say how long a text is, without and with its prompt; give one of them"
        greedy = f"do_sample=False takes the likeliest token, and {drawing} says how to draw; leave it out, or set "
        search = f"num_beams={o.num_beams} searches for the likeliest text, and {drawing} draws one; use one of the two"
        beams = "is for beams; set num_beams"
        texts = f"num_return_sequences={o.num_return_sequences}"
        return [
            (most is not None and whole is not None, f"max_new_tokens={most} and max_length={whole} {twice}"),
            (least > 0 and least_whole > 0, f"min_new_tokens={least} and min_length={least_whole} {twice}"),
            (o.top_p_decay > 0 and o.top_p == 0, f"top_p_decay={o.top_p_decay} has no top_p to shrink; give top_p"),
            (o.top_p_bound > 0 == o.top_p_decay, f"top_p_bound={o.top_p_bound} bounds no decay; give top_p_decay"),
            (o.top_p_bound > o.top_p, f"top_p_bound={o.top_p_bound} is above top_p={o.top_p}; lower it"),
            (o.do_sample is False and bool(self._drawing), f"{greedy}do_sample=True"),
            (is_search and o.samples, search),
            (is_search and o.num_return_sequences > o.num_beams, f"{texts} is more than num_beams={o.num_beams} find"),
            (not is_search and o.length_penalty != 1, f"length_penalty={o.length_penalty} {beams}"),
            (not is_search and bool(o.early_stopping), f"early_stopping={o.early_stopping} {beams}"),
            (
                not is_search and o.num_return_sequences > 1 and not o.samples,
                f"{texts} would all be the same text; set do_sample=True, or num_beams",
            ),
        ]

    @property
    def _drawing(self) -> str:
        """What the user wrote to have tokens drawn; not what changes nothing if they are not."""
        plain: dict[str, tuple[float, ...]] = {"temperature": (1.0,), "top_k": (0,), "top_p": (0.0,), "min_p": (0.0,)}
        if self.do_sample is False:
            plain["top_p"] = (0.0, 1.0)
        return " and ".join(f"{name}={getattr(self, name)}" for name in plain if getattr(self, name) not in plain[name])

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return bool(self._drawing) if self.do_sample is None else self.do_sample

    def new_token_limits(self, width: int, longest: int, limit: int | None) -> tuple[int, int]:
        """How many new tokens a row has at least, and at most.

        Args:
            width: Columns of the prompts; of a T5 those of the decoder.
            longest: Tokens of the longest prompt.
            limit: Rows of the model's table of positions; None if it has none.

        Raises:
            ConfigError: If nothing is left for new tokens, a text must be longer than it may, or it would outgrow the
                table of positions.
        """
        name = "max_new_tokens" if self.max_length is None else "max_length"
        room = None if limit is None else limit + 1 - longest  # the last new token is not read again
        most = self.max_new_tokens or DEFAULT_NEW_TOKENS
        if self.max_length is not None:
            most = self.max_length - width
        elif self.max_new_tokens is None and room is not None:
            most = min(most, max(room, 1))
        least = max(self.min_new_tokens, self.min_length - width)
        if not max(least, 1) <= most:
            names = ("min_new_tokens", "min_length", "max_new_tokens", "max_length")
            given = " and ".join(f"{each}={getattr(self, each)}" for each in names if getattr(self, each))
            raise ConfigError(
                f"{given or 'the default of max_new_tokens'} leaves rows of {width} (padding counts, too) at least"
                f" {max(least, 1)} and at most {most} new tokens; give a larger {name}"
            )
        if room is not None and most > room:
            fix = f"use {name} of at most {room if self.max_length is None else width + room}"
            raise ConfigError(
                f"a prompt of {longest} tokens and {name}={getattr(self, name) or most} need more positions than the "
                f"model's max_position_embeddings={limit}; {fix if room > 0 else f'cut the prompts to {limit} tokens'}"
            )
        return max(least, 0), most

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a row."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a row."""
        eos = self.eos_token_id
        return () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)


def options_from(arguments: Mapping[str, Any], on_tokens: object = None) -> GenerationOptions:
    """Options from keyword arguments; None, as in Hugging Face's generate, is what nobody has said anything about.

    Args:
        arguments: Fields of ``GenerationOptions``.
        on_tokens: What shall be called with each new token, if anything.

    Raises:
        ConfigError: If ``GenerationOptions`` refuses a name or a value, or nothing can be shown while a text grows.
    """
    options = GenerationOptions(**{name: value for name, value in arguments.items() if value is not None})
    if on_tokens is not None and not callable(on_tokens):
        raise ConfigError(f"on_tokens must be callable, got {on_tokens!r}")
    if on_tokens is not None and options.num_beams > 1:
        raise ConfigError(f"on_tokens shows texts while they grow, num_beams={options.num_beams} finds them at the end")
    return options
