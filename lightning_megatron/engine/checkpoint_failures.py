"""What does a user see when a checkpoint cannot be written or read? One line, the same on all ranks.

Torch gathers what ranks raised during a collective save or load and raises all of it, on every rank, as an exception
that no ``except Exception`` catches. What the files or the disk can cause becomes a ``CheckpointError`` here; the rest
is a defect, which comes out as it was.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from lightning_megatron.engine.pickles import more_than_data
from lightning_megatron.errors import CheckpointError

_CAUSED_BY_FILES = (
    CheckpointError,
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    ValueError,
    pickle.UnpicklingError,
)
"""What torch raises on files that are missing, damaged or of another model, and on a disk that is full."""

_OF_MEGATRON = "CheckpointingException"
"""What Megatron raises then; by its name, since importing it takes seconds that a conversion does not need."""

_LONGEST_REASON = 300
"""Characters."""


@contextlib.contextmanager
def failures_as_errors(refusal: str) -> Iterator[None]:
    """Raise a ``CheckpointError`` for failures that files can cause.

    Args:
        refusal: What did not happen; the message begins with it and goes on with the reason.

    Raises:
        CheckpointError: With the reason of the first rank that failed.
    """
    try:
        yield
    except CheckpointException as gathered:
        if not gathered.failures:  # megatron-core 0.16.1 tells only the coordinator (strategies/state_dict_saver.py)
            raise CheckpointError(f"{refusal}: another rank failed, see its message") from gathered
        rank, (cause, _) = min(gathered.failures.items())
        if not _is_caused_by_files(cause):
            raise
        raise CheckpointError(f"{refusal}: {_reason(cause)} (on rank {rank})") from gathered
    except Exception as error:
        if not _is_caused_by_files(error):
            raise
        raise CheckpointError(f"{refusal}: {_reason(error)}") from error


def _is_caused_by_files(error: BaseException) -> bool:
    return isinstance(error, _CAUSED_BY_FILES) or any(base.__name__ == _OF_MEGATRON for base in type(error).__mro__)


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return more_than_data(error)
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, CheckpointError):
        return text  # it has been here before
    if len(text) > _LONGEST_REASON:  # torch lists all tensors where one is missing
        text = text[:_LONGEST_REASON] + "..."
    # Torch's archive writer does not say why it could not write (inline_container.cc).
    return f"{text} (is the disk full?)" if "inline_container" in text or "iostream" in text else text
