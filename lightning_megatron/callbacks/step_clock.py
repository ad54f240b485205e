"""``StepClock``: times steps without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Times steps by CUDA events, or by the host's clock on a CPU, and waits for the device only in ``take``."""

    def __init__(self, device: torch.device) -> None:
        """Start without a step.

        Args:
            device: Device on which the steps run.
        """
        self._device = device
        self._last: Any = None
        self._steps: list[tuple[Any, Any, int, float]] = []

    def mark(self, tokens: int, flops: float) -> None:
        """Mark the end of a step; the step counts if the end of the previous one was marked."""
        now: Any = time.perf_counter()
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        if self._last is not None:
            self._steps.append((self._last, now, tokens, flops))
        self._last = now

    def interrupt(self) -> None:
        """Leave out the current step, in which something else than training happens."""
        self._last = None

    def take(self) -> tuple[list[float], int, float]:
        """Seconds of each step since the last call, and their total tokens and FLOPs. Waits for the device."""
        steps = self._steps
        self._steps = []
        if self._device.type == "cuda" and steps:
            _, last_end, _, _ = steps[-1]
            last_end.synchronize()
            seconds = [start.elapsed_time(end) / 1e3 for start, end, _, _ in steps]
        else:
            seconds = [end - start for start, end, _, _ in steps]
        total_tokens = sum(tokens for _, _, tokens, _ in steps)
        total_flops = sum(flops for _, _, _, flops in steps)
        return seconds, total_tokens, total_flops
