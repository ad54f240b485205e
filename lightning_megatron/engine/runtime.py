"""When is the engine switched on? Emulation, slot fillers and random streams, active only while Megatron works.

User code between two engine calls (callbacks, DataLoaders, other models) sees torch and its random numbers as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_megatron.engine.cpu import emulated_cuda
from lightning_megatron.engine.dist_checkpoint_patches import DIST_CHECKPOINT_PATCHES
from lightning_megatron.engine.patching import active
from lightning_megatron.engine.rng import EngineRng
from lightning_megatron.engine.slots.table import patches


class Runtime:
    """The engine's surroundings on one device; may be entered again while it is active."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for ``device``; nothing changes before ``active`` is entered."""
        self._device = device
        self._depth = 0
        self.rng: EngineRng | None = None

    def seed(self, seed: int, pp_rank: int) -> None:
        """Start the engine's random streams; call after the process groups exist."""
        with self.active():
            self.rng = EngineRng(seed, pp_rank, self._device)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Megatron may be called inside."""
        if self._depth > 0:
            yield
            return
        on_cpu = self._device.type == "cpu"
        self._depth += 1
        try:
            with (
                active(patches("cpu" if on_cpu else "cuda")),
                active(DIST_CHECKPOINT_PATCHES),
                emulated_cuda() if on_cpu else contextlib.nullcontext(),
                self.rng.active() if self.rng is not None else contextlib.nullcontext(),
            ):
                yield
        finally:
            self._depth -= 1
