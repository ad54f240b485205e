"""Campaigns: the same kind of fault again and again at random moments, for as long as one likes.

``nox -s campaign -- --minutes 30`` runs all of them in turn, ``python -m tests.campaigns --minutes 5 killed`` some.
They are no tests of pytest: what they find by chance becomes a test there.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one attempt ended."""

    wrong: str = ""
    """What was lost, or done wrong: a checkpoint, a bit of a loss, a message that does not name the cause."""
    hung: bool = False
    """Whether that is something that did not end in its time."""
    noticed: float | None = None
    """Seconds from the fault to the end of the last process; None where that says nothing."""
    steps: int = 0
    """Steps that were compared with those of a run without fault."""


Attempt: TypeAlias = Callable[[random.Random, Path], Outcome]
"""Makes one attempt in an empty folder, from random numbers that a seed repeats."""
