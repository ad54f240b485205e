"""Counter of host waits: calls of PyTorch in which the host waits for the GPU, with the code that made them.

PyTorch's sync debug mode sees what goes through its own operators: reading a tensor, blocking copies, data-dependent
shapes. It does not see an explicit ``torch.cuda.synchronize()`` or a wait for a communication on the host.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement import HostWaits

_MESSAGE = "called a synchronizing CUDA operation"
_OURS = ("lightning_megatron", "megatron")
_LIGHTNING = ("lightning", "pytorch_lightning")


class HostWaitCounter:
    """Counts from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._places: Counter[tuple[bool, str]] = Counter()

    def start(self) -> None:
        """Count from here."""
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # It announces itself as a prototype.
        torch.cuda.set_sync_debug_mode("warn")
        self._undo.callback(torch.cuda.set_sync_debug_mode, "default")
        warnings.simplefilter("always")
        warnings.showwarning = self._note

    def stop(self) -> None:
        """Count no longer."""
        self._undo.close()

    def per_step(self, num_steps: int) -> HostWaits:
        """The waits of ``num_steps`` steps, divided by their number."""
        return HostWaits(
            ours=sum(n for (is_ours, _), n in self._places.items() if is_ours) / num_steps,
            trainer=sum(n for (is_ours, _), n in self._places.items() if not is_ours) / num_steps,
            places={place: n / num_steps for (_, place), n in self._places.most_common()},
        )

    def _note(self, message: Any, *args: Any, **kwargs: Any) -> None:
        if _MESSAGE in str(message):
            self._places[attributed(traceback.extract_stack())] += 1


def attributed(stack: Iterable[traceback.FrameSummary]) -> tuple[bool, str]:
    """Whether our code or the engine's is in the stack, and the innermost line of it, else Lightning's."""
    places = [(_package(frame.filename), f"{Path(frame.filename).name}:{frame.lineno} {frame.name}") for frame in stack]
    # The launcher only calls the Trainer: what waits below it is not ours for that.
    places = [each for each in places if not (each[1].startswith("launch.py:") and each[1].endswith(" launch"))]
    for is_ours, packages in ((True, _OURS), (False, _LIGHTNING)):
        found = [f"{package}/{place}" for package, place in places if package in packages]
        if found:
            return is_ours, found[-1]
    return False, places[-1][1]


def _package(file: str) -> str:
    """The top-level package that a file belongs to, wherever it is installed."""
    parts = Path(file).parts
    return next((part for part in reversed(parts[:-1]) if part in (*_OURS, *_LIGHTNING)), "")
