"""Exceptions for user errors, checks that raise them, and their report on the command line.

Every message has three parts: the offending value, the rule it breaks, and the fix. The command line prints such an
error as one line and exits with code 2; everything else is a bug and keeps its traceback. Only the standard
library is imported, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

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
    """An invalid setting or file of the user, or an invalid combination of settings."""


class DataError(ConfigError):
    """A dataset, tokenizer or corpus that is missing, damaged, incompatible or too small."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, incomplete, damaged, unsafe or of another model."""


class NonFiniteError(ConfigError):
    """NaN or infinite loss or gradients in a step; the weights are those from before the step."""


class NumericsError(ConfigError):
    """Finite but wrong values: a loss that spikes repeatedly, or replicas of a weight that differ."""


class ReportedError(ConfigError):
    """A command of another rank of this host has ended with a user error, and printed it; as cause of a later error."""


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "True or False"),  # the string "false" would be truthy
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "str": (str, "a string"),
    "timedelta": (timedelta, "a datetime.timedelta"),
    "dict": ((Mapping, list, tuple), "a dict"),  # pairs make a dict, too
    "Mapping": ((Mapping, list, tuple), "a dict"),
    "list": ((list, tuple), "a list"),
}


LARGEST_COUNT = 2**31 - 1
"""Largest value of options that count something, unless they have a lower limit of their own."""
LARGEST_BATCH = 2**20
"""Largest number of rows in a microbatch, and of microbatches: products of both still fit into 64 bits."""
LARGEST_WORLD = 2**20
"""Largest number of ranks, on any axis."""
MOST_PROCESSES = 1024
"""Most processes that an option may start on this host."""
LARGEST_SEED = 2**64 - 1
"""Largest seed of torch's generators."""
_INTEGER_BITS = 64
"""Integers beyond this overflow in torch, NumPy and file formats, if not in the first loop over them."""


def require_kind(name: str, value: object, annotation: str) -> None:
    """Check the type of an option: YAML and forms pass strings that look like numbers.

    Numbers must also be finite, and integers fit into 64 bits.

    Args:
        name: Name of the option, as the user spells it.
        value: Its value.
        annotation: ``bool``, ``int``, ``float``, ``str``, ``timedelta``, ``dict[...]``, ``Mapping[...]`` or
            ``list[...]``, optionally ``| None``; others are ignored.

    Raises:
        ConfigError: "lr='3e-4' must be a number, and is a str; correct lr".
    """
    plain = annotation.removesuffix(" | None")
    if value is None and plain != annotation:
        return
    kind: type | tuple[type, ...] = object
    noun = ""
    if " | " not in plain:
        kind, noun = _KINDS.get(plain.partition("[")[0], (kind, noun))
    is_bool = isinstance(value, bool) and plain in ("int", "float")
    if is_bool or not isinstance(value, kind):
        raise ConfigError(
            f"{name}={value!r} must be {noun}, and is {type_of(value)}; correct {name}"
        )
    if noun == "a dict" and not isinstance(value, Mapping) and not _are_pairs(value):
        raise ConfigError(
            f"{name}={value!r} must be {noun}, and is {type_of(value)} of other than pairs; correct {name}"
        )
    if isinstance(value, Integral):
        if abs(int(value)) >= 2**_INTEGER_BITS:
            raise ConfigError(f"{name}={value} must fit into {_INTEGER_BITS} bits; correct {name}")
    elif isinstance(value, Real) and not math.isfinite(value):
        raise ConfigError(f"{name}={value} must be a finite number; correct {name}")


def type_of(value: object) -> str:
    """Name of a value's type with its article, for errors: ``an int``."""
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}"


def _are_pairs(values: Any) -> bool:
    return all(isinstance(each, (list, tuple)) and len(each) == 2 for each in values)


def require_number(
    name: str,
    value: object,
    at_least: float = 0,
    at_most: float | None = None,
) -> None:
    """Check that an option is a finite number from ``at_least`` to ``at_most``.

    Args:
        name: Name of the option, as the user spells it.
        value: Its value.
        at_least: Smallest valid value.
        at_most: Largest valid value; None: ``LARGEST_COUNT`` for integers, any finite number for others.

    Raises:
        ConfigError: "lr=-1 must be at least 0; correct lr".
    """
    require_kind(name, value, "float")
    if at_most is None:
        at_most = LARGEST_COUNT if isinstance(value, Integral) else math.inf
    if value < at_least:  # type: ignore[operator]
        raise ConfigError(f"{name}={value} must be at least {at_least}; correct {name}")
    if value > at_most:  # type: ignore[operator]
        raise ConfigError(f"{name}={value} must be at most {at_most}; correct {name}")


def require_choice(
    name: str,
    value: object,
    choices: Collection[str],
) -> None:
    """Check that an option is one of ``choices``.

    Args:
        name: Name of the option, as the user spells it.
        value: Its value.
        choices: Valid values, in the order of the message.

    Raises:
        ConfigError: "task='cloze' is unknown; choose from perplexity, last_word".
    """
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")


Options = TypeVar("Options")


def as_options(
    kind: type[Options],
    value: Options | Mapping[str, Any],
    name: str,
) -> Options:
    """``value`` as an instance of ``kind``; a mapping of its fields is accepted, e.g. hyper-parameters of a checkpoint.

    Raises:
        ConfigError: If it is neither an instance nor a mapping, or a field is unknown.
    """
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}={value!r}: expected {options_object(kind)}, got {type(value).__name__}"
        )
    try:
        return kind(**value)
    except TypeError:
        fields = ", ".join(inspect.signature(kind).parameters)
        raise ConfigError(
            f"{name}={value!r} must be {kind.__name__}(...) with fields from {fields}"
        ) from None


def options_object(kind: type) -> str:
    """How to write an options object, for errors: ``Heartbeat(...) or a dict, with setup, step, checkpoint, grace``."""
    return f"{kind.__name__}(...) or a dict, with {', '.join(inspect.signature(kind).parameters)}"


_MAX_DIVISOR = 1_000_000


def divisors(number: int) -> list[int]:
    """All divisors of ``number`` in ascending order; of a number beyond all sizes only those below a million."""
    root = math.isqrt(max(number, 0))
    last = min(root, _MAX_DIVISOR)
    small = [divisor for divisor in range(1, last + 1) if number % divisor == 0]
    if root > _MAX_DIVISOR:
        return small
    large = [number // divisor for divisor in small]
    return sorted({*small, *large})


def require_divides(
    divisor_name: str,
    divisor: int,
    dividend_name: str,
    dividend: int,
) -> None:
    """Check that ``divisor`` divides ``dividend``; the one message of every divisibility check.

    Args:
        divisor_name: Name of the option to change, as the user spells it, e.g. ``tp``.
        divisor: Its value.
        dividend_name: What it must divide, e.g. ``num_attention_heads``.
        dividend: Its value.

    Raises:
        ConfigError: "tp=3 does not divide num_attention_heads=16; choose tp from 1, 2, 4, 8, 16".
    """
    if divisor < 1 or dividend % divisor != 0:
        message = f"{divisor_name}={divisor} does not divide {dividend_name}={dividend}"
        if dividend > LARGEST_COUNT:  # whose divisors would take minutes to find
            raise ConfigError(
                f"{message}, which must be at most {LARGEST_COUNT}; correct {dividend_name}"
            )
        choices = ", ".join(str(d) for d in divisors(dividend))
        raise ConfigError(f"{message}; choose {divisor_name} from {choices}")


# ---- on the command line ---------------------------------------------------------------------------------------------

DONE = 0
WRONG_ARGUMENTS = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

_REPORT_DELAY_SECONDS = 6.0
"""How long other local ranks wait for local rank 0 to report the same error and end the job."""
_MAX_LINE_LENGTH = 600


def user_error(error: BaseException) -> str | None:
    """The message of a user error, in one line; None for any other error."""
    # Explicit causes only: an error raised while another is handled is a bug of its own.
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    for each in reversed(causes):
        if isinstance(each, ConfigError):
            return one_line(str(each))
    text = str(error)
    # By name, because --help does not import Lightning.
    is_of_lightning = any(
        cls.__name__ == "MisconfigurationException" for cls in type(error).__mro__
    )
    # EarlyStopping raises RuntimeError for a missing metric.
    if is_of_lightning or text.startswith("Early stopping conditioned on metric"):
        return one_line(text)
    # Of torch.load by one of Lightning's own strategies.
    if isinstance(error, RuntimeError) and text.startswith("PytorchStreamReader failed"):
        reason = text.partition("\n")[0]
        return one_line(f"a file of torch.save is damaged ({reason}); use another copy")
    return None


def one_line(text: str) -> str:
    """The text with whitespace collapsed, truncated to ``_MAX_LINE_LENGTH``."""
    line = " ".join(text.split())
    if len(line) > _MAX_LINE_LENGTH:
        line = line[: _MAX_LINE_LENGTH - 1] + "…"
    return line


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Escape control characters and Unicode direction overrides, e.g. as ``\x1b``: files could hold terminal commands.

    Args:
        text: One line.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def report(message: str) -> int:
    """Print ``error: <message>`` once for all local ranks, and return the exit code.

    A user error usually occurs on every rank, so local rank 0 reports it. Other ranks wait until their parent process
    exits or the delay has passed; if the job is still running then, only this rank has the error, and it reports it.
    """
    rank = _local_rank()
    parent = os.getppid()
    deadline = time.monotonic() + _REPORT_DELAY_SECONDS
    while rank > 0 and time.monotonic() < deadline:
        if os.getppid() != parent:
            return WRONG_ARGUMENTS
        time.sleep(0.1)
    if rank > 0:
        message = f"local rank {rank}: {message}"
    print(f"error: {printable(message)}", file=sys.stderr, flush=True)
    return WRONG_ARGUMENTS


def report_interrupt() -> int:
    """Print one line for all local ranks, as Ctrl-C reaches all of them, and return the exit code that shells use."""
    if _local_rank() == 0:
        print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def is_broken_pipe(output: TextIO) -> bool:
    """Whether the reader of a pipe has exited, as ``head`` does; further output is then discarded."""
    try:
        output.flush()  # unwritten output is still buffered
    except BrokenPipeError:
        # Otherwise the interpreter flushes again at exit, and reports an error.
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), output.fileno())
        return True
    return False


def _local_rank() -> int:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        rank = os.environ.get(name, "")
        if rank.isdigit():
            return int(rank)
    return 0
