"""Runtime environment of the engine on a device: patches of Megatron, random states and, without a GPU, CUDA emulation.

Megatron has two random streams on the device: the default one, equal on all ranks of a TP group (dropout outside TP),
and the tracked one, different on each (dropout inside). On a CPU the device's default generator is also that of user
code and DataLoaders, which would make TP ranks diverge, so the engine keeps its own state there and swaps it in while
it runs.

Megatron's patches last from ``patch`` to ``unpatch``, a complete run of a Trainer, so that steps do not pay for them.
Random states and CUDA emulation last for one call of the engine: user code between two calls (callbacks, DataLoaders,
other models) uses the original torch and its own random state.
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
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from lightning_megatron.engine import cpu
from lightning_megatron.engine.patches import CPU, patches, replacements

_PP_STRIDE = 100
"""Distance between the seeds of two pipeline stages, as in Megatron-LM (training/initialize.py:_set_random_seed)."""
_CP_STRIDE = 100_000
"""Distance between those of two ranks of a cp group, which would use the same dropout masks for different tokens."""
_DEFAULT_SEED = 1234


def run_seed() -> int:
    """Seed of ``seed_everything`` (Lightning passes it to all ranks), or a fixed one."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


class Runtime:
    """Runtime environment of one strategy; ``active`` is reentrant."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for ``device``; nothing is patched before ``patch`` or ``active``."""
        self._on_cpu = device.type == "cpu"
        self._patches = contextlib.ExitStack()
        self._is_patched = self._is_active = False
        self._parked_rng_state: torch.Tensor | None = None
        """On a CPU: the default random state, the engine's or the user's, that torch does not use at the moment."""

    def seed(
        self,
        seed: int,
        pp_rank: int,
        cp_rank: int = 0,
    ) -> None:
        """Seed the engine's random streams on this rank; every rank must call, after the process groups exist.

        Args:
            seed: The run's seed, the same on all ranks.
            pp_rank: This rank's pipeline stage; stages draw different dropout masks.
            cp_rank: This rank's context-parallel rank; ranks draw different masks for their tokens.
        """
        self._parked_rng_state = None
        with self.active():
            user_state = torch.get_rng_state()
            model_parallel_cuda_manual_seed(
                seed + _PP_STRIDE * pp_rank + _CP_STRIDE * cp_rank,
                force_reset_rng=True,
            )
            engine_state = torch.get_rng_state()
            torch.set_rng_state(user_state)
        self._parked_rng_state = engine_state

    def _swap_rng_state(self) -> None:
        if self._on_cpu and self._parked_rng_state is not None:
            current = torch.get_rng_state()
            torch.set_rng_state(self._parked_rng_state)
            self._parked_rng_state = current

    def state_dict(self) -> dict[str, Any]:
        """All random states of this rank, as tensors and plain numbers."""
        kind, keys, *rest = np.random.get_state(legacy=True)
        version, internal, gauss = random.getstate()
        with self.active():
            return {
                "python": [version, list(internal), gauss],
                "numpy": [
                    str(kind),
                    torch.from_numpy(np.asarray(keys).astype(np.int64)),
                    *rest,
                ],
                "torch": self._parked_rng_state if self._on_cpu else torch.get_rng_state(),
                "device": torch.cuda.get_rng_state(),
                "tracker": dict(get_cuda_rng_tracker().get_states()),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all random states that ``state_dict`` returned."""
        self.load_user_state(state)
        with self.active():
            get_cuda_rng_tracker().set_states(state["tracker"])
            torch.cuda.set_rng_state(state["device"])

    def load_user_state(self, state: dict[str, Any]) -> None:
        """Restore only the random states of user code, which are valid for any layout."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = state["numpy"]
        np.random.set_state(
            (
                kind,
                keys.numpy().astype(np.uint32),
                *rest,
            )
        )
        with self.active():
            if self._on_cpu:
                self._parked_rng_state = state["torch"]
            else:
                torch.set_rng_state(state["torch"])

    def patch(self) -> None:
        """Apply the patches of Megatron until ``unpatch``."""
        if not self._is_patched:
            rows = patches("cpu" if self._on_cpu else "cuda")
            self._patches.enter_context(patched(replacements(rows)))
            self._is_patched = True

    def unpatch(self) -> None:
        """Restore Megatron's own functions."""
        self._patches.close()
        self._is_patched = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which Megatron may be called; also after ``unpatch``, for a model whose run has ended."""
        if self._is_active:
            yield
            return
        was_patched = self._is_patched
        self._is_active = True
        try:
            self.patch()
            with contextlib.ExitStack() as stack:
                if self._on_cpu:
                    stack.enter_context(emulated_cuda())
                self._swap_rng_state()
                stack.callback(self._swap_rng_state)
                yield
        finally:
            self._is_active = False
            if not was_patched:
                self.unpatch()


@contextlib.contextmanager
def patched(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Apply what ``patches.replacements`` returned, and restore every original at the end of the block."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            patch = mock.patch.object(owner, name, replacement, create=True)
            stack.enter_context(patch)
        yield


@functools.cache
def _cpu_replacements() -> list[tuple[Any, str, Any]]:
    return replacements(CPU)


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """Redirect the engine's CUDA calls to the CPU within the block."""
    with patched(_cpu_replacements()), cpu.CudaMeansCpu():
        yield


def unchanged_environment() -> contextlib.AbstractContextManager[Any]:
    """Restore the environment variables at the end of the block.

    megatron-core 0.16.1, models/common/language_module/language_module.py: building a model sets NVTE_FLASH_ATTN and
    the like for the process.
    """
    return mock.patch.dict(os.environ)
