"""Errors that a user can cause, and checks that word them.

Every message has three parts: the offending value, the rule it breaks, and the fix. The command line prints such an
error as one line and exits with code 2; everything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, TypeVar


class ConfigError(ValueError):
    """A setting, file or combination of the user's that cannot work."""


class DataError(ConfigError):
    """A dataset, tokenizer or corpus that is missing, damaged, foreign or too small."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, half-written, damaged, unsafe or of another model."""


class NonFiniteError(ConfigError):
    """A step whose loss or gradients are NaN or infinite; the weights are as they were before it."""


class NumericsError(ConfigError):
    """Numbers that are finite and wrong: a loss that spikes again and again, or copies of a weight that differ."""


_KINDS: dict[str, tuple[type, str]] = {
    "bool": (bool, "True or False"),  # "false" would count as true
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
    "timedelta": (timedelta, "a datetime.timedelta"),
}


def require_kind(name: str, value: object, annotation: str) -> None:
    """Raise unless ``value`` is what ``annotation`` says: YAML and forms hand over strings that look like numbers.

    Args:
        name: The setting, as the user spells it.
        value: What it was set to.
        annotation: ``bool``, ``int``, ``float``, ``str`` or ``timedelta``, perhaps ``| None``; others are not checked.

    Raises:
        ConfigError: "lr='3e-4' must be a number, and is a str; correct lr".
    """
    plain = annotation.removesuffix(" | None")
    kind, noun = _KINDS.get(plain, (object, ""))
    if value is None and plain != annotation:
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and plain in ("int", "float")):
        raise ConfigError(f"{name}={value!r} must be {noun}, and is a {type(value).__name__}; correct {name}")


def require_number(name: str, value: object, at_least: float = 0) -> None:
    """Raise unless ``value`` is a number that is large enough.

    Args:
        name: The setting, as the user spells it.
        value: What it was set to.
        at_least: The smallest number that is allowed.

    Raises:
        ConfigError: "lr=-1 must be at least 0; correct lr".
    """
    require_kind(name, value, "float")
    if not value >= at_least:  # type: ignore[operator]  # "not >=" instead of "<": it catches NaN as well
        raise ConfigError(f"{name}={value} must be at least {at_least}; correct {name}")


def require_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Args:
        name: The setting, as the user spells it.
        value: What it was set to.
        choices: What it may be, in the order in which a message names them.

    Raises:
        ConfigError: "task='cloze' is unknown; choose from perplexity, last_word".
    """
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")


Options = TypeVar("Options")


def as_options(kind: type[Options], value: Options | Mapping[str, Any], name: str) -> Options:
    """``value``, or the options that a mapping says field by field, as hyper-parameters in checkpoints do.

    Raises:
        ConfigError: If it is neither, or a field is unknown.
    """
    if isinstance(value, kind):
        return value
    try:
        return kind(**value)  # type: ignore[arg-type]
    except TypeError:
        fields = ", ".join(inspect.signature(kind).parameters)
        raise ConfigError(f"{name}={value!r} must be {kind.__name__}(...) with fields from {fields}") from None


def divisors(number: int) -> list[int]:
    """All divisors of ``number`` in ascending order; they are the choices that a divisibility message offers."""
    return [d for d in range(1, number + 1) if number % d == 0]


def require_divides(divisor_name: str, divisor: int, dividend_name: str, dividend: int) -> None:
    """Raise unless ``divisor`` divides ``dividend``: the one wording of every divisibility rule.

    Args:
        divisor_name: The setting to change, as the user spells it, e.g. ``tp``.
        divisor: Its value.
        dividend_name: What it must divide, e.g. ``num_attention_heads``.
        dividend: Its value.

    Raises:
        ConfigError: "tp=3 does not divide num_attention_heads=16; choose tp from 1, 2, 4, 8, 16".
    """
    if divisor < 1 or dividend % divisor != 0:
        choices = ", ".join(str(d) for d in divisors(dividend))
        raise ConfigError(
            f"{divisor_name}={divisor} does not divide {dividend_name}={dividend}; choose {divisor_name} from {choices}"
        )


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
