"""Errors that a user can cause, checks that word them, and how the command line tells them.

Every message has three parts: the offending value, the rule it breaks, and the fix. The command line prints such an
error as one line and exits with code 2; everything else is a defect of ours and keeps its traceback. Only the standard
library is imported, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, TextIO, TypeVar


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
    small = [d for d in range(1, math.isqrt(max(number, 0)) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


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


# ---- on the command line ---------------------------------------------------------------------------------------------

DONE, WRONG_ARGUMENTS, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 2, 130, 141, 143

_PATIENCE_SECONDS = 6.0
"""How long a rank other than 0 waits for local rank 0 to report the same mistake and end the job.

Longer than the 5 s after which Lightning's launcher notices a child that ended, and kills local rank 0 unheard.
"""
_LONGEST_LINE = 600


def user_error(error: BaseException) -> str | None:
    """The one line that explains a mistake of the user's; None if the error is not one."""
    # Only explicit causes: an error met while another is handled is a defect of its own.
    causes = [error]
    while causes[-1].__cause__ is not None and causes[-1].__cause__ not in causes:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        if isinstance(cause, ConfigError):
            return one_line(str(cause))
    # Compared by name, because Lightning is not loaded for --help; a metric that EarlyStopping lacks has no such name.
    names = {cls.__name__ for cls in type(error).__mro__}
    if "MisconfigurationException" in names or str(error).startswith("Early stopping conditioned on metric"):
        return one_line(str(error))
    return None


def one_line(text: str) -> str:
    """The text without line breaks, cut off where it is far too long to read."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def printable(text: str) -> str:
    r"""The text with control characters, which a terminal obeys, and overrides of the writing direction as ``\x1b``.

    Args:
        text: One line, some of which came from a file.
    """
    return re.sub("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda found: ascii(found[0])[1:-1], text)


def with_cli_flags(message: str, parser: argparse.ArgumentParser) -> str:
    """The message with options named as they are typed: ``top_k=3`` becomes ``--top-k 3``.

    A name of one word is replaced only before ``=``: ``seed`` may be English.

    Args:
        message: Of an error raised by what the command calls, which knows the options by their names in Python.
        parser: The command's; an option's ``dest`` is that name.
    """
    begin = r"(?<![\w./=-])"  # not within a path or another name
    for action in parser._actions:
        name, flag = action.dest, next((each for each in action.option_strings if each.startswith("--")), "--help")
        if flag != "--help":
            if action.nargs == 0:
                message = re.sub(rf"{begin}{name}=True\b", flag, message)
            message = re.sub(rf"{begin}{name}=(?=\S)", f"{flag} ", message)
            if "_" in name:
                message = re.sub(rf"{begin}{name}(?![\w/=]|\.\w)", flag, message)
    return message


def report(message: str) -> int:
    """Print ``error: <message>`` once for all local ranks, and return the exit code.

    A mistake is seen by every rank alike, so local rank 0 speaks for all. Another rank stays silent while the process
    that started it lives to say so; if nobody has ended the job by then, only this rank has met the error, and says it.
    """
    rank, parent, deadline = _local_rank(), os.getppid(), time.monotonic() + _PATIENCE_SECONDS
    while rank > 0 and time.monotonic() < deadline:
        if os.getppid() != parent:
            return WRONG_ARGUMENTS
        time.sleep(0.1)
    who = f"local rank {rank}: " if rank > 0 else ""
    print(f"error: {who}{printable(message)}", file=sys.stderr, flush=True)
    return WRONG_ARGUMENTS


def report_interrupt() -> int:
    """Print one line for all local ranks, which Ctrl-C reaches together, and return the exit code that shells use."""
    if _local_rank() == 0:
        print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def is_broken_pipe(output: TextIO) -> bool:
    """Whether the program behind a pipe has ended, as ``head`` does; then what is still to come goes nowhere."""
    try:
        output.flush()  # what could not be written is still there
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # or the interpreter would try once more at its end, and complain
            os.dup2(nowhere.fileno(), output.fileno())
        return True
    return False


def _local_rank() -> int:
    ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "SLURM_LOCALID"))
    return next((int(rank) for rank in ranks if rank.isdigit()), 0)
