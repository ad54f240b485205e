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

_FILE_ERROR_NAMES = {"CheckpointingException"}
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
        # In a collective load torch raises the failures of all ranks on every rank.
        rank, (cause, _) = min(getattr(error, "failures", {0: (error, None)}).items())
        if not is_caused_by_files(cause):
            raise
        raise CheckpointError(
            f"{refusal}: {_reason(cause)}" + (f" (on rank {rank})" if cause is not error else "")
        ) from error


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
    return (
        f"it holds more than data ({match.group(1)})"
        if match
        else "it holds more than data, or is damaged"
    )


def is_caused_by_files(error: BaseException) -> bool:
    """Whether files, a disk or an object store have caused ``error``; other errors are bugs."""
    names = {base.__name__ for base in type(error).__mro__}
    return (
        isinstance(error, _FILE_ERRORS)
        or not names.isdisjoint(_FILE_ERROR_NAMES)
        or _is_from_store(error)
    )


def _is_from_store(error: BaseException) -> bool:
    """Whether a store's client has raised ``error``, of whatever type: botocore's, for example, share no base.

    Every call of a store goes through fsspec, or through a method of a file system or file of fsspec's.
    """
    if not isinstance(error, Exception):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        bases = {
            base.__module__.partition(".")[0] for base in type(frame.f_locals.get("self")).__mro__
        }
        if package in _STORE_PACKAGES or not bases.isdisjoint(_STORE_PACKAGES):
            return True
    return False


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return pickle_refusal(error)
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, _FILE_ERRORS):
        text = f"{type(error).__name__}: {text}"  # of a library, whose messages may be a word
    if isinstance(error, CheckpointError):
        return text  # already converted
    if len(text) > _MAX_REASON_LENGTH:  # torch lists all tensors if one is missing
        text = text[:_MAX_REASON_LENGTH] + "..."
    # Torch's archive writer does not give the reason of a failed write (inline_container.cc).
    return (
        f"{text} (is the disk full?)" if "inline_container" in text or "iostream" in text else text
    )
