"""How does the command line fail? A user's mistake is one line and exit code 2; a defect keeps its traceback."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import advice

DONE, WRONG_ARGUMENTS, INTERRUPTED, UNREAD, TERMINATED = 0, 2, 130, 141, 143

_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID")
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
    for cause in reversed(list(_causes(error))):
        if isinstance(cause, ConfigError):
            return _one_line(str(cause))
    # Compared by name, because the libraries that define them are not loaded for --help.
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "ArgumentError" in kinds:  # jsonargparse's
        return _without_parser_noise(str(error))
    if "MisconfigurationException" in kinds:  # Lightning's
        return _one_line(str(error))
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()  # "raise error from error" makes an error its own cause
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def printable(text: str) -> str:
    r"""The text with control characters, which a terminal obeys, and overrides of the writing direction as ``\x1b``.

    Args:
        text: One line, some of which came from a file.
    """
    return re.sub("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda found: ascii(found[0])[1:-1], text)


def _without_parser_noise(text: str) -> str:
    """The message of jsonargparse without its list of everything that a value could have been.

    An option of type A or B that fits neither is reported with the reason for each. What says only "Expected a <class
    B>" is left out: the user meant the other.
    """
    head, separator, body = text.partition("Errors:\n")
    if separator:
        found = [
            " ".join(reason.split()) for reason in re.split(r"^\s*- ", body.split("Given value type:")[0], flags=re.M)
        ]
        telling = [
            reason for reason in found if reason and not reason.startswith(("Expected a <", "Does not validate"))
        ]
        if telling:
            option = head.split("\n")[0]
            text = f"{option} {'; '.join(telling)}"
    refused = re.search(r"(?:[Oo]ption '|arguments: --)([\w.-]+)", text)
    hint = advice(refused[1].rpartition(".")[2], typed=True) if refused else ""
    text = re.sub(r'^Parser key "(\S+)":', r"\1:", text.strip())
    return _one_line(f"{text}; {hint}" if hint else text)


def report(message: str) -> int:
    """Print ``error: <message>`` once for all local ranks, and return the exit code.

    A mistake is seen by every rank alike, so local rank 0 speaks for all. Another rank stays silent while the process
    that started it lives to say so; if nobody has ended the job by then, only this rank has met the error, and says it.
    """
    rank = _local_rank()
    if rank == 0:
        print(f"error: {printable(message)}", file=sys.stderr, flush=True)
        return WRONG_ARGUMENTS
    parent = os.getppid()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if os.getppid() != parent:
            return WRONG_ARGUMENTS
        time.sleep(0.1)
    print(f"error: local rank {rank}: {printable(message)}", file=sys.stderr, flush=True)
    return WRONG_ARGUMENTS


def report_interrupt() -> int:
    """Print one line for all local ranks, which Ctrl-C reaches together, and return the exit code that shells use."""
    if _local_rank() == 0:
        print("interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def is_unread(output: TextIO) -> bool:
    """Whether the program behind a pipe has ended, as ``head`` does; then what is still to come goes nowhere."""
    poll = select.poll()
    try:
        poll.register(output.fileno(), 0)
    except OSError:  # no file
        return False
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    # Or the interpreter would try once more at its end, and complain.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), output.fileno())
    return True


def _local_rank() -> int:
    return next((int(os.environ[name]) for name in _LOCAL_RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)
