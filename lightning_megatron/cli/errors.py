"""Errors of the command line: a user's mistake is one line and exit code 2, a defect keeps its traceback.

Only the standard library is imported, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from typing import TextIO

from lightning_megatron.errors import ConfigError

DONE, WRONG_ARGUMENTS, INTERRUPTED, UNREAD, TERMINATED = 0, 2, 130, 141, 143

_PATIENCE_SECONDS = 6.0
"""How long a rank other than 0 waits for local rank 0 to report the same mistake and end the job.

Longer than the 5 s after which Lightning's launcher notices a child that ended, and kills local rank 0 unheard.
"""
_LONGEST_LINE = 600


class UsageError(ConfigError):
    """Arguments that the command line does not accept."""


def users_mistake(error: BaseException) -> str | None:
    """The one line that explains a mistake of the user's; None if the error is not one."""
    # Only explicit causes: an error met while another is handled is a defect of its own.
    causes = [error]
    while causes[-1].__cause__ is not None and causes[-1].__cause__ not in causes:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        if isinstance(cause, ConfigError):
            return one_line(str(cause))
    # Compared by name, because Lightning is not loaded for --help.
    if "MisconfigurationException" in {cls.__name__ for cls in type(error).__mro__}:
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


def in_typed_words(message: str, parser: argparse.ArgumentParser) -> str:
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


def is_unread(output: TextIO) -> bool:
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
