"""Random states of tensor-parallel ranks."""

from __future__ import annotations

import contextlib

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def forked(differs: bool) -> contextlib.AbstractContextManager[object]:
    """Context with this tp rank's own random state if ``differs``; else with the one that all have.

    Forking the tracker copies random states on the host, so ask for it only where numbers are drawn.
    """
    if differs:
        fork: contextlib.AbstractContextManager[object] = get_cuda_rng_tracker().fork()
        return fork
    return contextlib.nullcontext()
