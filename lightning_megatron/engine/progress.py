"""Progress of this process: counters that loops increment, and by which a run that hangs is recognized."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counters of this process's work; loops that may run for minutes increment them."""

    ticks: int = 0
    """Units of work: microbatches, tokens, pieces of files."""
    steps: int = 0
    """Batches."""
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=11))
    """Seconds for which each of the last checkpoints blocked training."""


progress = Progress()
