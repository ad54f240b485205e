"""Errors of files, disks and stores, as user errors with their reason."""

from __future__ import annotations

import contextlib
import pickle
import re
import traceback
from collections.abc import Iterator

from lightning_megatron.errors import CheckpointError, ConfigError

_FILE_ERRORS = (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError)
"""What torch raises for files that are missing, damaged or of another model, and for a full disk."""

_MEGATRON_ERROR = "CheckpointingException"
"""The same of Megatron; by name, since conversion needs no import of it."""
_STORE_PACKAGES = {"fsspec", "upath"}
"""Packages through which every call of a store goes."""

_MAX_REASON_LENGTH = 300
"""Characters."""


@contextlib.contextmanager
def failures_as_errors(refusal: str) -> Iterator[None]:
    """Convert exceptions caused by files or a disk to ``CheckpointError``; others are bugs and propagate.

    Args:
        refusal: Beginning of the message, e.g. "PATH cannot be written"; the reason is appended.

    Raises:
        CheckpointError: With the reason of the first rank that failed.
    """
    try:
        yield
    except BaseException as error:
        cause = error
        where = ""
        failures = getattr(error, "failures", None)
        if failures is not None:
            # In a collective load torch raises the failures of all ranks on every rank.
            rank = min(failures)
            cause, _ = failures[rank]
            where = f" (on rank {rank})"
        if not is_caused_by_files(cause):
            raise
        raise CheckpointError(f"{refusal}: {_reason(cause)}{where}") from error


@contextlib.contextmanager
def store_failures_as_errors(refusal: str) -> Iterator[None]:
    """Convert what a store's client raises, of whatever type, to ``CheckpointError``; all else propagates.

    Args:
        refusal: Beginning of the message; the reason is appended.

    Raises:
        CheckpointError: With the reason.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or not _is_from_store(error):
            raise
        raise CheckpointError(
            f"{refusal}: {_reason(error)}; correct the address, or its permissions"
        ) from error


def pickle_refusal(error: pickle.UnpicklingError) -> str:
    """Why torch refused to unpickle a file; torch's own message advises to load it anyway."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    if match is None:
        return "it holds more than data, or is damaged"
    return f"it holds more than data ({match[1]})"


def is_caused_by_files(error: BaseException) -> bool:
    """Whether files, a disk or an object store have caused ``error``; other errors are bugs."""
    if isinstance(error, _FILE_ERRORS):
        return True
    is_of_megatron = any(base.__name__ == _MEGATRON_ERROR for base in type(error).__mro__)
    return is_of_megatron or _is_from_store(error)


def _is_from_store(error: BaseException) -> bool:
    """Whether a store's client has raised ``error``, of whatever type: botocore's, for example, share no base.

    Every call of a store goes through fsspec, or through a method of a file system or file of fsspec's.
    """
    if not isinstance(error, Exception):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        classes = type(frame.f_locals.get("self")).__mro__
        modules = [str(frame.f_globals.get("__name__")), *(each.__module__ for each in classes)]
        if any(module.partition(".")[0] in _STORE_PACKAGES for module in modules):
            return True
    return False


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return pickle_refusal(error)
    lines = str(error).strip().split("\n")
    text = lines[0] or type(error).__name__
    if not isinstance(error, _FILE_ERRORS):
        text = f"{type(error).__name__}: {text}"  # of a library, whose messages may be a word
    if isinstance(error, CheckpointError):
        return text  # already converted
    if len(text) > _MAX_REASON_LENGTH:  # torch lists all tensors if one is missing
        text = text[:_MAX_REASON_LENGTH] + "..."
    # Torch's archive writer does not give the reason of a failed write (inline_container.cc).
    if "inline_container" in text or "iostream" in text:
        text += " (is the disk full?)"
    return text
