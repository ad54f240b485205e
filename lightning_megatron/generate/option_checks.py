"""Which options of generation contradict each other or are out of range? What can be said without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.generate.options import GenerationOptions

_LEAST_TEMPERATURE = 1e-30
"""Logits that are divided by less may leave float32, and what is drawn from no numbers would be the last token."""


def check_options(options: GenerationOptions) -> None:
    """Refuse what cannot be meant.

    Raises:
        ConfigError: If a number is out of range, or two options contradict each other.
    """
    _check_lengths(options)
    _check_numbers(options)
    _check_drawing(options)
    _check_beams(options)
    _check_ends(options)


def _check_lengths(options: GenerationOptions) -> None:
    for name, least in (("max_new_tokens", 1), ("max_length", 2)):
        if getattr(options, name) is not None:
            _check_integer(name, getattr(options, name), least)
    _check_integer("min_new_tokens", options.min_new_tokens, 0)
    _check_integer("min_length", options.min_length, 0)
    if options.max_new_tokens is not None and options.max_length is not None:
        raise ConfigError(
            f"max_new_tokens={options.max_new_tokens} and max_length={options.max_length} both say how long a text may "
            "become, without and with its prompt; give one of them"
        )
    if options.min_new_tokens > 0 and options.min_length > 0:
        raise ConfigError(
            f"min_new_tokens={options.min_new_tokens} and min_length={options.min_length} both say how long a text "
            "must become, without and with its prompt; give one of them"
        )
    for least_name, most_name in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        least, most = getattr(options, least_name), getattr(options, most_name)
        if most is not None and least > most:
            raise ConfigError(f"{least_name}={least} is more than {most_name}={most}; raise the latter")


def _check_numbers(options: GenerationOptions) -> None:
    _check_integer("top_k", options.top_k, 0)
    _check_integer("no_repeat_ngram_size", options.no_repeat_ngram_size, 0)
    if not isinstance(options.seed, int) or isinstance(options.seed, bool) or not -(2**63) <= options.seed < 2**64:
        raise ConfigError(f"seed={options.seed!r} must be an integer of at most 64 bits; correct it")
    for name in ("top_p", "top_p_decay", "top_p_bound", "min_p"):
        _check_number(name, getattr(options, name))
        if not 0.0 <= getattr(options, name) <= 1.0:
            raise ConfigError(f"{name}={getattr(options, name)} is no number from 0 to 1; correct it")
    for name in ("temperature", "repetition_penalty", "length_penalty"):
        _check_number(name, getattr(options, name))
    if not _LEAST_TEMPERATURE <= options.temperature <= 100.0:
        raise ConfigError(
            f"temperature={options.temperature} must be from {_LEAST_TEMPERATURE} to 100; leave it out for the "
            "likeliest token"
        )
    if not 0.0 < options.repetition_penalty < float("inf"):
        raise ConfigError(
            f"repetition_penalty={options.repetition_penalty} must be above 0 and finite; 1 penalizes nothing"
        )
    if not abs(options.length_penalty) < float("inf"):
        raise ConfigError(f"length_penalty={options.length_penalty} must be finite; 0 ignores the length")


def _check_drawing(options: GenerationOptions) -> None:
    if options.top_k > 0 and 0.0 < options.top_p < 1.0:
        raise ConfigError(
            f"top_k={options.top_k} and top_p={options.top_p} both say what to draw from; give one of them"
        )
    if options.top_p_decay > 0.0 and options.top_p == 0.0:
        raise ConfigError(f"top_p_decay={options.top_p_decay} has no top_p to shrink; give top_p")
    if options.top_p_bound > 0.0 and options.top_p_decay == 0.0:
        raise ConfigError(f"top_p_bound={options.top_p_bound} bounds no decay; give top_p_decay")
    if options.top_p_bound > options.top_p:
        raise ConfigError(f"top_p_bound={options.top_p_bound} is above top_p={options.top_p}; lower it")
    if options.do_sample is False and _how_to_draw(options):
        raise ConfigError(
            f"do_sample=False takes the likeliest token, and {_how_to_draw(options)} says how to draw; leave it out, "
            "or set do_sample=True"
        )


def _check_beams(options: GenerationOptions) -> None:
    _check_integer("num_beams", options.num_beams, 1)
    _check_integer("num_return_sequences", options.num_return_sequences, 1)
    if options.early_stopping not in (True, False, "never"):
        raise ConfigError(f"early_stopping={options.early_stopping!r} is none of True, False and 'never'; use one")
    if options.num_beams > 1:
        if options.samples:
            raise ConfigError(
                f"num_beams={options.num_beams} searches for the likeliest text, and {_how_to_draw(options)} draws "
                "one; use one of the two"
            )
        if options.num_return_sequences > options.num_beams:
            raise ConfigError(
                f"num_return_sequences={options.num_return_sequences} is more than num_beams={options.num_beams} find; "
                "raise num_beams"
            )
        return
    for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(options, name) != default:
            raise ConfigError(f"{name}={getattr(options, name)} is for beams; set num_beams to 2 or more")
    if options.num_return_sequences > 1 and not options.samples:
        raise ConfigError(
            f"num_return_sequences={options.num_return_sequences} would all be the same text; set do_sample=True, or "
            "num_beams"
        )


def _check_ends(options: GenerationOptions) -> None:
    _check_tokens("eos_token_id", options.eos_token_id, "an integer, or a tuple of them")
    for name in ("pad_token_id", "bos_token_id"):
        _check_tokens(name, getattr(options, name), "an integer")
    if not isinstance(options.stop_sequences, Sequence) or isinstance(options.stop_sequences, str):
        raise ConfigError(f"stop_sequences={options.stop_sequences!r} are no tuple of tuples of tokens; give that")
    for sequence in options.stop_sequences:
        if not isinstance(sequence, Sequence) or isinstance(sequence, str):
            raise ConfigError(
                f"stop_sequences={options.stop_sequences!r} has {sequence!r}, which is no tuple of tokens; give each "
                "sequence as one (texts are stop_strings)"
            )
        if len(sequence) == 0:
            raise ConfigError("stop_sequences has an empty sequence, which every text ends with; remove it")
        _check_tokens("stop_sequences", sequence, "tuples of integers")
    if not isinstance(options.stop_strings, (str, Sequence)) or not all(isinstance(x, str) for x in options.stop_texts):
        raise ConfigError(f"stop_strings={options.stop_strings!r} are no texts; give one, or a tuple of them")
    if "" in options.stop_texts and options.stop_strings != ():
        raise ConfigError("stop_strings has an empty text, which every text ends with; remove it")
    if options.stop_texts and options.tokenizer is None:
        raise ConfigError(
            f"stop_strings={options.stop_strings!r} cannot be found without a tokenizer, which knows how tokens read; "
            "give tokenizer, too"
        )


def _how_to_draw(options: GenerationOptions) -> str:
    """What the user wrote to have tokens drawn; not what changes nothing if they are not."""
    harmless = {"do_sample": (None, False), "temperature": (1.0,), "top_k": (0,), "top_p": (0.0,), "min_p": (0.0,)}
    if options.do_sample is False:
        harmless["top_p"] = (0.0, 1.0)
    given = [name for name, values in harmless.items() if getattr(options, name) not in values]
    return " and ".join(f"{name}={getattr(options, name)}" for name in given)


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}; correct it")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be a number; correct it")


def _check_tokens(name: str, value: Any, kind: str) -> None:
    tokens = () if value is None else (value,) if not isinstance(value, Sequence) else value
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{name}={value!r} must be {kind}; correct it")
