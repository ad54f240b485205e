"""Where does the time of a new token go? Some decoding steps of one call under the profiler, or counted for waits."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from benchmarks.host_waits import HostWaitCounter
from benchmarks.recorder import busy_line

_SKIPPED_TOKENS = 8
"""The prompts, and steps that record or compile."""
_WATCHED_TOKENS = 20
_ROWS = 25


class Watcher(Protocol):
    """Begins and ends to look."""

    def start(self) -> None:
        """Look from here."""

    def stop(self) -> None:
        """Look no longer."""


class StepWindow:
    """Called with each new token, it lets a watcher see some of the steps in between."""

    def __init__(self, watcher: Watcher, device: torch.device, new_tokens: int) -> None:
        """Choose the steps.

        Args:
            watcher: What looks.
            device: Waited for before and after; it must not be busy with other steps.
            new_tokens: Of the call.
        """
        self._watcher = watcher
        self._device = device
        self._first = min(_SKIPPED_TOKENS, new_tokens // 3)
        self.steps = min(_WATCHED_TOKENS, new_tokens - self._first - 1)
        """How many."""
        self.seconds = 0.0
        """What they took, the watcher's own cost included."""
        self._seen = 0
        self._began = 0.0

    def __call__(self, tokens: torch.Tensor) -> None:
        """A token of each row has been chosen."""
        self._seen += 1
        if self._seen == self._first:
            self._wait()
            self._watcher.start()
            self._began = time.perf_counter()
        elif self._seen == self._first + self.steps:
            self._wait()
            self.seconds = time.perf_counter() - self._began
            self._watcher.stop()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def new_profiler(device: torch.device) -> Any:
    """Of the host, and of the device if it is another."""
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])])


def profile_text(profiler: Any, window: StepWindow, device: torch.device) -> str:
    """What took the most of the host's and of the device's time, and how much of it the device had something to do."""
    averages = profiler.key_averages()
    orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if device.type == "cuda" else [])]
    tables = [averages.table(sort_by=order, row_limit=_ROWS, max_name_column_width=90) for order in orders]
    per_step = f"{window.seconds / window.steps * 1e3:.3f} ms a step under the profiler, {window.steps} steps"
    if device.type != "cuda":
        return "\n".join([*tables, per_step])
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    return "\n".join([*tables, f"{per_step}; {busy_line(spans, window.steps)}"])


def waits_text(counter: HostWaitCounter, window: StepWindow) -> str:
    """Each line of code that made the host wait, and how often in a step."""
    waits = counter.per_step(window.steps)
    lines = [f"host waits {per_step:g} x per step in {place}" for place, per_step in waits.places.items()]
    return "\n".join(lines) or f"the host waited in none of {window.steps} steps"
