"""Reports of failed runs: the last line of the output names the rank that failed first, and its exception.

Where one rank raises, the others lose their connections to it, and each would print a long traceback of that. The rank
that fails first announces itself in torch.distributed's store, which outlives it, and its traceback ends with the line.
On the other ranks the exception stays the same for callers, but is reported as one line where nobody catches it. If the
first one is a user error, it is the cause of the others, so that commands end with its exit code on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import traceback
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_megatron.errors import ConfigError, ReportedError, one_line, user_error

_LOST_CONNECTION = re.compile(
    r"connection (closed|reset)|broken pipe|socket|nccl|gloo", re.IGNORECASE
)
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torchrun: the file whose exception its agent prints after all ranks have ended."""

_runs = itertools.count()


class FailureReport:
    """Which rank of one run has failed first; every rank must have one for each run, in the same order."""

    def __init__(self) -> None:
        """Begin a run; does not communicate."""
        self._key = f"lightning_megatron/failure/{next(_runs)}"

    def announce(self, error: BaseException) -> None:
        """Announce that this rank fails with ``error``, or have it reported as one line if another one was first."""
        if not isinstance(error, Exception) or not dist.is_initialized():
            return
        if dist.get_world_size() == 1:
            return
        rank = dist.get_rank()
        text = describe(error)
        with contextlib.suppress(RuntimeError):  # the rank that serves the store has ended
            store = dist.distributed_c10d._get_default_store()
            # Not announced: the rank that was lost has died without a word, or will announce itself.
            if is_lost_connection(error) and not store.check([self._key]):
                return
            message = user_error(error)
            announced = store.compare_set(self._key, "", json.dumps([rank, text, message]))
            first_rank, first_text, first_message = json.loads(announced)
            line = f"error: rank {first_rank} failed: {first_text}"
            if first_rank != rank:
                if isinstance(error, RuntimeError):
                    report_as(error, f"{line}; rank {rank} ends with it")
                    is_reported = isinstance(error.__cause__, ReportedError)
                    if first_message is not None and not is_reported:
                        error.__cause__ = ConfigError(f"rank {first_rank}: {first_message}")
                return
            error.add_note(line)
            if _ERROR_FILE in os.environ:
                get_error_handler().record_exception(error)


def describe(error: Exception) -> str:
    """Type, message and place of an exception, in one line; the place is the innermost one outside of libraries."""
    text = one_line(f"{type(error).__name__}: {error}")
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if _LIBRARIES not in each.filename
    ]
    if not frames:
        return text
    place = frames[-1]
    return f"{text} ({os.path.basename(place.filename)}:{place.lineno} in {place.name})"


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` is that of a collective whose other rank has ended."""
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def report_as(error: BaseException, line: str) -> None:
    """Print ``line`` instead of a traceback if nobody catches ``error``; the line of the last call counts."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException],
        value: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if value is error:
            print(line, file=sys.stderr, flush=True)
        else:
            previous(kind, value, trace)

    sys.excepthook = hook
