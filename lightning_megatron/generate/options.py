"""Generation options under Hugging Face's names: ``GenerationOptions``, validated before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_megatron.errors import LARGEST_COUNT, LARGEST_SEED, ConfigError
from lightning_megatron.foreign_names import checks_options

DEFAULT_NEW_TOKENS = 20
"""Maximum number of new tokens per row if no option sets one."""

_PYTHON_ONLY: Any = {"flag": ""}
"""Metadata of fields without a flag of the command ``generate``."""

_RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, LARGEST_COUNT),
    "num_beams": (1, LARGEST_COUNT),
    "num_return_sequences": (1, LARGEST_COUNT),
    "max_length": (2, LARGEST_COUNT),
    "min_new_tokens": (0, LARGEST_COUNT),
    "min_length": (0, LARGEST_COUNT),
    "top_k": (0, LARGEST_COUNT),
    "no_repeat_ngram_size": (0, LARGEST_COUNT),
    "seed": (-(2**63), LARGEST_SEED),
    "top_p": (0, 1),
    "top_p_decay": (0, 1),
    "top_p_bound": (0, 1),
    "min_p": (0, 1),
    # Dividing logits by less may overflow float32, and sampling from NaN would return the last token.
    "temperature": (1e-30, 100),
    "repetition_penalty": (1e-30, 1e30),
    # Scores of sequences of 4096 tokens, divided by 4096 to this power, still fit into float32.
    "length_penalty": (-10, 10),
}
"""Inclusive ranges of the numeric options."""


@checks_options
@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of ``MegatronModule.generate``, named as in Hugging Face's ``generate`` and Megatron's inference server.

    Greedy unless an option asks for sampling or beam search. Of a model's ``generation_config.json`` only the special
    tokens are used, and no option is switched on silently (Hugging Face samples from the 50 most likely tokens).
    """

    max_new_tokens: int | None = None
    """Maximum number of new tokens per row (default: what ``max_length`` leaves, else 20, or fewer to fit the position
    embeddings)."""
    max_length: int | None = None
    """Maximum number of tokens per row, including the columns of the prompts (for a T5, of the decoder's prompts)."""
    min_new_tokens: int = 0
    """Minimum number of new tokens; until then no end-of-sequence token is chosen and no stop sequence ends a row."""
    min_length: int = 0
    """As ``min_new_tokens``, but including the prompts as in ``max_length``."""
    do_sample: bool | None = field(default=None, metadata={"flag": "--sample"})
    """Sample tokens, or take the most likely one (default: sample if temperature, top_k, top_p or min_p is set)."""
    temperature: float = 1.0
    """Divisor of the logits, in (0, 100]."""
    top_k: int = 0
    """Sample only from this many of the most likely tokens; 0 for all."""
    top_p: float = 0.0
    """Sample only from the most likely tokens (after ``top_k``) that together reach this probability; 0 for all."""
    top_p_decay: float = 0.0
    """Factor by which ``top_p`` is multiplied after each token; 0 for none."""
    top_p_bound: float = 0.0
    """Lower bound of a decaying ``top_p``."""
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the most likely token's probability; 0 for all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the row already contains, and multiplies the negative ones."""
    no_repeat_ngram_size: int = 0
    """Size of n-grams that may occur only once in a row, including its prompt (for a T5, the decoder's); 0 for no
    limit."""
    num_return_sequences: int = 1
    """Sequences per prompt, consecutive in the result: samples, or the best beams."""
    num_beams: int = 1
    """Beams per prompt for beam search; 1 for no beam search."""
    length_penalty: float = 1.0
    """Beam search: the score is the sum of log-probabilities divided by the number of new tokens to this power."""
    early_stopping: bool | Literal["never"] = field(default=False, metadata=_PYTHON_ONLY)
    """Beam search: True ends it when ``num_beams`` sequences are complete; False when no better one is expected at the
    current length; ``never`` when none is possible."""
    eos_token_id: int | tuple[int, ...] | None = field(default=None, metadata=_PYTHON_ONLY)
    """End-of-sequence tokens; None for the model's own, () for none."""
    pad_token_id: int | None = field(default=None, metadata=_PYTHON_ONLY)
    """Padding token for rows that end before others; None for the model's own, else the first end-of-sequence token."""
    bos_token_id: int | None = field(default=None, metadata=_PYTHON_ONLY)
    """Token prepended to each prompt that does not begin with it, also in the result (Megatron's ``add_BOS``)."""
    stop_sequences: tuple[tuple[int, ...], ...] = field(default=(), metadata=_PYTHON_ONLY)
    """Sequences of new tokens that end a row; they stay in it."""
    stop_strings: str | tuple[str, ...] = field(default=(), metadata={"flag": "--stop"})
    """Strings that end a row with the token that completes one, however it is tokenized, even if it begins in the
    prompt or ``min_new_tokens`` is not reached. As in Hugging Face's ``generate``, with a tokenizer."""
    stop_strings_from_prompt: bool = field(default=True, metadata=_PYTHON_ONLY)
    """Whether a stop string may begin in the prompt, as in Hugging Face's ``generate``; False looks at new tokens
    only."""
    tokenizer: Any = field(
        default=None,
        repr=False,
        compare=False,
        metadata=_PYTHON_ONLY,
    )
    """Tokenizer for ``stop_strings``: an object of transformers, or a directory."""
    seed: int = 0
    """Seed for sampling; the same prompts, options and seed give the same sequences on every layout."""
    static_cache: bool | None = None
    """KV caches of a fixed size: every step has the same shapes, and a GPU replays it as a CUDA graph from the third
    token on. Not for T5s, mixtures of experts, and ``dynamic`` and ``longrope`` rotary scaling (default: on GPUs, where
    possible and if there are enough new tokens to gain by it)."""

    def __post_init__(self) -> None:
        """Validate everything that does not depend on a model.

        Raises:
            ConfigError: If a value is out of range, or two options contradict each other.
        """
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if name == "temperature" and value == 0:
                raise ConfigError(
                    "temperature=0 must be more than 0; leave it out for the most likely tokens (greedy)"
                )
            if value is not None and not low <= value <= high:
                bounds = f"from {low} to {high}"
                if not isinstance(high, int):
                    bounds = f"from {low:g} to {high:g}"
                raise ConfigError(f"{name}={value!r} must be a number {bounds}; correct {name}")
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(
                f"early_stopping={self.early_stopping!r} must be True, False or 'never'"
            )
        runs = self.stop_sequences
        are_runs = _are_all(runs, Sequence) and all(run and _are_all(run, int) for run in runs)
        if not are_runs or not _are_all(self.eos_token_ids, int):
            raise ConfigError(
                f"eos_token_id={self.eos_token_id!r}, stop_sequences={runs!r}: expected integers, and tuples of them"
            )
        strings = self.stop_strings
        if not _are_all(strings, str) or "" in self.stop_texts:
            raise ConfigError(
                f"stop_strings={strings!r}: expected a non-empty string or a tuple of them"
            )
        for applies, message in self._contradictions():
            if applies:
                raise ConfigError(message)

    def _contradictions(self) -> list[tuple[bool, str]]:
        """Combinations of options that exclude each other: whether each is present, and its error message."""
        sampling = self._sampling or "do_sample=True"
        is_search = self.num_beams > 1
        twice = "both limit the length, without and with the prompt; give one of them"
        greedy = f"do_sample=False takes the most likely token, but {sampling} is for sampling; leave it out, or set "
        search = f"num_beams={self.num_beams} is for beam search, but {sampling} is for sampling; use one of the two"
        beams = "is for beam search; set num_beams"
        several = f"num_return_sequences={self.num_return_sequences}"
        return [
            (
                None not in (self.max_new_tokens, self.max_length),
                f"{self._given(('max_new_tokens', 'max_length'))} {twice}",
            ),
            (
                self.min_new_tokens > 0 and self.min_length > 0,
                f"{self._given(('min_new_tokens', 'min_length'))} {twice}",
            ),
            (
                self.top_p_decay > 0 and self.top_p == 0,
                f"top_p_decay={self.top_p_decay} has no top_p to shrink; give top_p",
            ),
            (
                self.top_p_bound > 0 == self.top_p_decay,
                f"top_p_bound={self.top_p_bound} bounds no decay; give top_p_decay",
            ),
            (
                self.top_p_bound > self.top_p,
                f"top_p_bound={self.top_p_bound} is above top_p={self.top_p}; lower it",
            ),
            (self.do_sample is False and bool(self._sampling), f"{greedy}do_sample=True"),
            (is_search and self.samples, search),
            (
                is_search and self.num_return_sequences > self.num_beams,
                f"{several} exceeds num_beams={self.num_beams}",
            ),
            (
                not is_search and self.length_penalty != 1,
                f"length_penalty={self.length_penalty} {beams}",
            ),
            (
                not is_search and bool(self.early_stopping),
                f"early_stopping={self.early_stopping} {beams}",
            ),
            (
                not is_search and self.num_return_sequences > 1 and not self.samples,
                f"{several} would return the same sequence each time; set do_sample=True, or num_beams",
            ),
        ]

    @property
    def _sampling(self) -> str:
        """The sampling options that are set, for error messages; none that has no effect if nothing is sampled."""
        unset: dict[str, tuple[float, ...]] = {
            "temperature": (1.0,),
            "top_k": (0,),
            "top_p": (0.0,),
            "min_p": (0.0,),
        }
        if self.do_sample is False:
            unset["top_p"] = (0.0, 1.0)
        return self._given(name for name in unset if getattr(self, name) not in unset[name])

    def _given(self, names: Iterable[str]) -> str:
        """Options and their values, for error messages."""
        return " and ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        if self.do_sample is None:
            return bool(self._sampling)
        return self.do_sample

    def new_token_limits(
        self,
        width: int,
        longest: int,
        limit: int | None,
    ) -> tuple[int, int]:
        """Minimum and maximum number of new tokens per row.

        Args:
            width: Columns of the prompts; of a T5, of the decoder's.
            longest: Number of tokens of the longest prompt.
            limit: Number of position embeddings; None for a model without a table of them.

        Raises:
            ConfigError: If no room is left for new tokens, the minimum exceeds the maximum, or a row would outgrow the
                position embeddings.
        """
        name = "max_new_tokens"
        # Columns that the option counts besides new tokens.
        counted = 0
        if self.max_length is not None:
            name = "max_length"
            counted = width
        # The last new token is not fed back.
        room = None if limit is None else limit + 1 - longest
        maximum = self.max_new_tokens or DEFAULT_NEW_TOKENS
        if self.max_length is not None:
            maximum = self.max_length - width
        elif self.max_new_tokens is None and room is not None:
            maximum = min(maximum, max(room, 1))
        minimum = max(self.min_new_tokens, self.min_length - width)
        if not max(minimum, 1) <= maximum:
            names = ("min_new_tokens", "min_length", "max_new_tokens", "max_length")
            given = self._given(option for option in names if getattr(self, option))
            raise ConfigError(
                f"{given or 'the default of max_new_tokens'} leaves rows of {width} (padding included) at least"
                f" {max(minimum, 1)} and at most {maximum} new tokens; give a larger {name}"
            )
        if room is not None and maximum > room:
            fix = f"use {name} of at most {counted + room}"
            if room <= 0:
                fix = f"cut the prompts to {limit} tokens"
            raise ConfigError(
                f"a prompt of {longest} tokens and {name}={counted + maximum} need more positions than the"
                f" model's max_position_embeddings={limit}; {fix}"
            )
        return max(minimum, 0), maximum

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if isinstance(self.stop_strings, str):
            return (self.stop_strings,)
        return tuple(self.stop_strings)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens as a tuple."""
        return as_tuple(self.eos_token_id)


def _are_all(values: object, kind: type) -> bool:
    """Whether ``values`` is a sequence of instances of ``kind``."""
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def as_tuple(tokens: int | Sequence[int] | None) -> tuple[int, ...]:
    """Tokens that are given as one, several or none."""
    if tokens is None:
        return ()
    if isinstance(tokens, Sequence):
        return tuple(tokens)
    return (tokens,)


def options_from(
    arguments: Mapping[str, Any],
    on_tokens: object = None,
) -> GenerationOptions:
    """Build options from keyword arguments; None means not given, as in Hugging Face's ``generate``.

    Args:
        arguments: Fields of ``GenerationOptions``.
        on_tokens: Callback for new tokens, if any.

    Raises:
        ConfigError: If ``GenerationOptions`` refuses a name or a value, or ``on_tokens`` is not callable or is combined
            with beam search.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    options = GenerationOptions(**given)
    if on_tokens is not None and not callable(on_tokens):
        raise ConfigError(f"on_tokens must be callable, got {on_tokens!r}")
    if on_tokens is not None and options.num_beams > 1:
        raise ConfigError(
            f"on_tokens streams tokens, num_beams={options.num_beams} finds them at the end; use one"
        )
    return options
