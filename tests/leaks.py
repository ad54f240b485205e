"""Detection of what a test leaves behind in its process.

Shared by the guard of the pytest process (conftest.py) and by the ranks (ranks.py). Nothing heavy is imported
here: a library that the test did not load cannot have been changed by it.
"""

from __future__ import annotations

import sys
from typing import Any

_MISSING = object()


class Baseline:
    """The state of torch at one moment, as far as it is loaded; ``leaks()`` names what differs later."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._loaded = torch is not None
        if torch is not None:
            self._dtype = torch.get_default_dtype()
            self._cuda = {name: value for name, value in vars(torch.cuda).items() if callable(value)}

    def leaks(self) -> list[str]:
        """What was changed and not restored; empty if nothing, or if torch was not loaded at the baseline."""
        if not self._loaded:
            return []
        torch = sys.modules["torch"]
        found = [
            f"torch.cuda.{name} is patched"
            for name, value in self._cuda.items()
            if vars(torch.cuda).get(name, _MISSING) is not value
        ]
        if torch.get_default_dtype() != self._dtype:
            found.append(f"torch's default dtype is {torch.get_default_dtype()}")
        return found

    def restore(self) -> None:
        """Put back what ``leaks()`` names, so that one bad test does not fail the next."""
        if not self._loaded:
            return
        torch = sys.modules["torch"]
        torch.set_default_dtype(self._dtype)
        for name, value in self._cuda.items():
            if vars(torch.cuda).get(name, _MISSING) is not value:
                setattr(torch.cuda, name, value)


def process_group_leaks() -> list[str]:
    """Process groups that exist in this process: fine in a rank, a leak in the pytest process."""
    found = []
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.append("torch.distributed is initialised; use run_ranks() instead of the pytest process")
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        found.append("megatron.core.parallel_state is initialised; use run_ranks() instead of the pytest process")
    return found


def drop_process_groups() -> None:
    """Destroy what ``process_group_leaks`` names."""
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
