"""The engine's surroundings on one device: patches of Megatron, random streams and, without a GPU, CUDA emulation.

Megatron keeps two random streams on the device: the default one, equal on all ranks of a TP group (dropout outside TP),
and the tracked one, different on each (dropout inside). On a CPU the device's default generator is also the one that
user code and DataLoaders draw from, which would make TP ranks drift apart, so the engine keeps its own state there and
swaps it in while it works.

Megatron's patches last from ``patch`` to ``unpatch``, a whole run of a Trainer, so that a step does not pay for them.
Random streams and what stands in for CUDA last for one call of the engine: user code between two calls (callbacks,
DataLoaders, other models) sees torch and its random numbers as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from lightning_megatron.engine import cpu
from lightning_megatron.engine.patches import CPU, patches, replacements

_PP_STRIDE, _CP_STRIDE = 100, 100_000
"""Megatron-LM's distance between the seeds of two pipeline stages (training/initialize.py:_set_random_seed), and ours
of two ranks of a cp group, which would drop the same of different tokens otherwise."""
_DEFAULT_SEED = 1234


def run_seed() -> int:
    """The seed given to ``seed_everything`` (Lightning hands it to all ranks), else a fixed one."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


class Runtime:
    """The surroundings of one strategy; may be entered again while they are active."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for ``device``; nothing changes before ``patch`` or ``active``."""
        self._on_cpu = device.type == "cpu"
        self._patched = contextlib.ExitStack()
        self._is_held = self._is_active = False
        self._parked: torch.Tensor | None = None
        """On a CPU: of the engine's default stream and the user's, the one that torch does not hold at the moment."""

    def seed(self, seed: int, pp_rank: int, cp_rank: int = 0) -> None:
        """Start the engine's random streams on this rank; every rank must call, after the process groups exist.

        Args:
            seed: The run's seed, the same on all ranks.
            pp_rank: This rank's stage; stages draw different masks.
            cp_rank: Of which tokens of a row; other tokens, other masks.
        """
        self._parked = None
        with self.active():
            outside = torch.get_rng_state()
            model_parallel_cuda_manual_seed(seed + _PP_STRIDE * pp_rank + _CP_STRIDE * cp_rank, force_reset_rng=True)
            started = torch.get_rng_state()
            torch.set_rng_state(outside)
        self._parked = started

    def _swap(self) -> None:
        if self._on_cpu and self._parked is not None:
            held = torch.get_rng_state()
            torch.set_rng_state(self._parked)
            self._parked = held

    def state_dict(self) -> dict[str, Any]:
        """All random states of this rank as tensors and plain numbers."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        version, internal, gauss = random.getstate()
        with self.active():
            return {
                "python": [version, list(internal), gauss],
                "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
                "torch": self._parked if self._on_cpu else torch.get_rng_state(),
                "device": torch.cuda.get_rng_state(),
                "tracker": dict(get_cuda_rng_tracker().get_states()),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue every stream where ``state_dict`` was taken."""
        self.load_user_state(state)
        with self.active():
            get_cuda_rng_tracker().set_states(state["tracker"])
            torch.cuda.set_rng_state(state["device"])

    def load_user_state(self, state: dict[str, Any]) -> None:
        """Continue only the streams that user code draws from; they mean the same on any layout."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        with self.active():
            if self._on_cpu:
                self._parked = state["torch"]
            else:
                torch.set_rng_state(state["torch"])

    def patch(self) -> None:
        """Patch Megatron until ``unpatch``."""
        if not self._is_held:
            self._patched.enter_context(patched(replacements(patches("cpu" if self._on_cpu else "cuda"))))
            self._is_held = True

    def unpatch(self) -> None:
        """Put Megatron's own functions back."""
        self._patched.close()
        self._is_held = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Megatron may be called inside; also after ``unpatch``, where a model is asked whose run has ended."""
        if self._is_active:
            yield
            return
        was_held, self._is_active = self._is_held, True
        try:
            self.patch()
            with contextlib.ExitStack() as around:
                if self._on_cpu:
                    around.enter_context(emulated_cuda())
                self._swap()
                around.callback(self._swap)
                yield
        finally:
            self._is_active = False
            if not was_held:
                self.unpatch()


@contextlib.contextmanager
def patched(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put what ``patches.replacements`` says into its places, and every original back, however the block ends."""
    with contextlib.ExitStack() as undo:
        for owner, name, stand_in in replacements:
            undo.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        yield


@functools.cache
def _cpu_stand_ins() -> list[tuple[Any, str, Any]]:
    return replacements(CPU)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """While active, the engine's CUDA calls mean the CPU; afterwards torch is as it was."""
    with patched(_cpu_stand_ins()), cpu.CudaMeansCpu():
        yield


def unchanged_environment() -> contextlib.AbstractContextManager[Any]:
    """Undo what is written to the environment inside.

    megatron-core 0.16.1, models/common/language_module/language_module.py: building a model sets NVTE_FLASH_ATTN and
    the like for the whole process.
    """
    return mock.patch.dict(os.environ)
