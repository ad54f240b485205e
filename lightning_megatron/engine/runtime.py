"""The engine's surroundings on one device: patches of Megatron, random streams and, without a GPU, CUDA emulation.

Megatron's patches last from ``hold`` to ``release``, a whole run of a Trainer, so that a step does not pay for them.
Random streams and what stands in for CUDA last for one call of the engine: user code between two calls (callbacks,
DataLoaders, other models) sees torch and its random numbers as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch

from lightning_megatron.engine import cpu
from lightning_megatron.engine.patches import CPU, active, patches
from lightning_megatron.engine.rng import EngineRng


class Runtime:
    """The surroundings of one strategy; may be entered again while they are active."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for ``device``; nothing changes before ``hold`` or ``active``."""
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._patched = contextlib.ExitStack()
        self._is_held = self._is_active = False
        self.rng: EngineRng | None = None

    def seed(self, seed: int, pp_rank: int) -> None:
        """Start the engine's random streams; call after the process groups exist."""
        with self.active():
            self.rng = EngineRng(seed, pp_rank, self._device)

    def hold(self) -> None:
        """Patch Megatron until ``release``."""
        if not self._is_held:
            self._patched.enter_context(active(patches("cpu" if self._on_cpu else "cuda")))
            self._is_held = True

    def release(self) -> None:
        """Put Megatron's own functions back."""
        self._patched.close()
        self._is_held = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Megatron may be called inside."""
        if self._is_active:
            yield
            return
        was_held, self._is_active = self._is_held, True
        try:
            self.hold()
            with (
                emulated_cuda() if self._on_cpu else contextlib.nullcontext(),
                self.rng.active() if self.rng is not None else contextlib.nullcontext(),
            ):
                yield
        finally:
            self._is_active = False
            if not was_held:
                self.release()


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """While active, the engine's CUDA calls mean the CPU; afterwards torch is as it was."""
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    log.addFilter(cpu.is_not_about_one_generator)
    try:
        with active(CPU), cpu.CudaMeansCpu():
            yield
    finally:
        log.removeFilter(cpu.is_not_about_one_generator)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Undo what is written to the environment inside.

    megatron-core 0.16.1, models/common/language_module/language_module.py: building a model sets NVTE_FLASH_ATTN and
    the like for the whole process.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
