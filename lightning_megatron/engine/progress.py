"""Progress of this process: counters that loops increment, and by which a run that hangs is recognized."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Counters of this process's work; loops that may run for minutes report to it, and only it writes them."""

    ticks: int = 0
    """Units of work: microbatches, tokens, pieces of files."""
    steps: int = 0
    """Batches."""
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=11))
    """Seconds for which each of the last checkpoints blocked training."""

    def tick(self) -> None:
        """Count a unit of work."""
        self.ticks += 1

    def step(self) -> None:
        """Count a batch."""
        self.steps += 1

    def saved(self, seconds: float) -> None:
        """Record for how long a checkpoint blocked training."""
        self.saves.append(seconds)


progress = Progress()
