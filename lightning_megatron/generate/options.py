"""How shall tokens be chosen, and when is a text finished? ``GenerationOptions``, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from lightning_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of ``MegatronModule.generate``, named as in Hugging Face's ``generate`` and in Megatron's server.

    Greedy unless something says to sample. Nothing is taken from a model's ``generation_config.json`` but the tokens
    that end and pad a text, and nothing is switched on silently (Hugging Face samples from the 50 likeliest tokens).
    """

    max_new_tokens: int = 20
    """How many tokens a row gets at most."""
    min_new_tokens: int = 0
    """No row ends before it has so many."""
    do_sample: bool | None = None
    """Draw tokens at random; False takes the likeliest; None samples if temperature, top_k or top_p are set."""
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
    repetition_penalty: float = 1.0
    """Positive logits of tokens that a row has already are divided by it, negative ones multiplied."""
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
    seed: int = 0
    """The same prompts, options and seed give the same text on every layout."""
    static_cache: bool = False
    """Faster on GPUs: caches of a fixed size let every step have the same shapes and be replayed as a CUDA graph; the
    first two steps, which prepare it, take longer. Not for T5s and for ``dynamic`` and ``longrope`` rotary scaling."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ConfigError: If a number is out of range, or two options contradict each other.
        """
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; raise the "
                "latter"
            )
        _check_integer("top_k", self.top_k, 0)
        for name in ("top_p", "top_p_decay", "top_p_bound"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name}={getattr(self, name)} is no number from 0 to 1; correct it")
        if not 0.0 < self.temperature <= 100.0:
            raise ConfigError(
                f"temperature={self.temperature} must be above 0 and at most 100; for the likeliest token leave it out"
            )
        if not self.repetition_penalty > 0.0:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 penalizes nothing")
        self._check_contradictions()
        self._check_beams()
        for sequence in self.stop_sequences:
            if len(sequence) == 0:
                raise ConfigError("stop_sequences has an empty sequence, which every text ends with; remove it")

    def _check_contradictions(self) -> None:
        if self.top_k > 0 and self.top_p > 0.0:
            raise ConfigError(f"top_k={self.top_k} and top_p={self.top_p} both say what to draw from; give one of them")
        if self.top_p_decay > 0.0 and self.top_p == 0.0:
            raise ConfigError(f"top_p_decay={self.top_p_decay} has no top_p to shrink; give top_p")
        if self.top_p_bound > 0.0 and self.top_p_decay == 0.0:
            raise ConfigError(f"top_p_bound={self.top_p_bound} bounds no decay; give top_p_decay")
        if self.top_p_bound > self.top_p:
            raise ConfigError(f"top_p_bound={self.top_p_bound} is above top_p={self.top_p}; lower it")
        if self.do_sample is False and self._shapes_distribution:
            raise ConfigError(
                "do_sample=False takes the likeliest token, and temperature, top_k or top_p say how to draw; leave "
                "them out, or set do_sample=True"
            )

    def _check_beams(self) -> None:
        _check_integer("num_beams", self.num_beams, 1)
        _check_integer("num_return_sequences", self.num_return_sequences, 1)
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"early_stopping={self.early_stopping!r} is none of True, False and 'never'; use one")
        if self.num_beams > 1:
            if self.samples:
                raise ConfigError(
                    f"num_beams={self.num_beams} searches for the likeliest text, and do_sample, temperature, top_k "
                    "and top_p draw one; use one of the two"
                )
            if self.num_return_sequences > self.num_beams:
                raise ConfigError(
                    f"num_return_sequences={self.num_return_sequences} is more than num_beams={self.num_beams} find; "
                    "raise num_beams"
                )
            return
        if self.length_penalty != 1.0 or self.early_stopping is not False:
            raise ConfigError("length_penalty and early_stopping are for beams; set num_beams to 2 or more")
        if self.num_return_sequences > 1 and not self.samples:
            raise ConfigError(
                f"num_return_sequences={self.num_return_sequences} would all be the same text; set do_sample=True, or "
                "num_beams"
            )

    @property
    def _shapes_distribution(self) -> bool:
        return self.temperature != 1.0 or self.top_k > 0 or self.top_p > 0.0

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return self._shapes_distribution if self.do_sample is None else self.do_sample

    def top_p_at(self, step: int) -> float:
        """``top_p`` for the new token number ``step``, from 0.

        Megatron-LM, text generation: the first token is drawn with the whole ``top_p``, which then decays.
        """
        if self.top_p_decay == 0.0:
            return self.top_p
        return max(self.top_p * self.top_p_decay**step, self.top_p_bound)

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
    known = [field.name for field in fields(GenerationOptions)]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"generate has no option {name!r}; choose from {', '.join(known)}")
    try:
        return GenerationOptions(**arguments)
    except TypeError as error:
        raise ConfigError(f"an option of generate has the wrong type: {error}") from error


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}; correct it")
