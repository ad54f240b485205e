"""Campaigns: repeated faults of the same kind at random moments, for a given time.

``nox -s campaign -- --minutes 30`` runs all of them in turn, ``python -m tests.campaigns --minutes 5 killed`` some.
They are not pytest tests: a fault that they find becomes one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one attempt."""

    wrong: str = ""
    """Failure, or "": a lost checkpoint, another loss, a message that does not name the cause."""
    hung: bool = False
    """Whether the failure is that a process did not end in time."""
    noticed: float | None = None
    """Seconds from the fault to the end of the last process; None if not applicable."""
    steps: int = 0
    """Number of steps compared with a run without fault."""


Attempt: TypeAlias = Callable[[random.Random, Path], Outcome]
"""Makes one attempt in an empty directory with seeded random numbers."""
