"""Progress of this process: counters that loops increment, and by which a run that hangs is recognized."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
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
    is_saving: bool = False
    """Whether the main thread saves a checkpoint."""

    def tick(self) -> None:
        """Count a unit of work."""
        self.ticks += 1

    def step(self) -> None:
        """Count a batch."""
        self.steps += 1

    def saved(self, seconds: float) -> None:
        """Record for how long a checkpoint blocked training."""
        self.saves.append(seconds)

    def extend_last_save(self, seconds: float) -> None:
        """Let the last checkpoint have blocked training for at least ``seconds``, with the hooks before it."""
        if self.saves:
            self.saves[-1] = max(self.saves[-1], seconds)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context, or decorator of a function, in which the main thread saves a checkpoint."""
        before = self.is_saving
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = before


progress = Progress()
