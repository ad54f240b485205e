"""CUDA graphs: functions of tensors that stay in place are recorded once, and replayed without the host."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], Tensor]
"""Reads and writes tensors that stay in place, and returns one; the host decides nothing in it by their numbers."""


class CudaGraphs:
    """Records on a GPU. Nothing of it stays behind when what it has returned is dropped."""

    def __init__(self, device: torch.device) -> None:
        """Record on ``device``."""
        self._stream = _side_stream(device)

    def prepared(self, work: Work) -> Tensor:
        """Do the work once as it will be recorded, so that all is compiled and allocated.

        On the stream of the recording, which has libraries' workspaces of its own.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        # The memory of the output is given out again on the side stream alone, which waits for its readers first.
        current.wait_stream(self._stream)
        return output

    def recorded(self, works: Sequence[Work]) -> list[Work]:
        """Each work as a function that repeats it and returns the same tensor, written anew.

        The graphs share one pool of memory, so they must not run at the same time.

        Raises:
            RuntimeError: If one cannot be recorded; nothing has been computed then.
        """
        pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._stream.device)
        collects = gc.isenabled()
        # Python could free a graph or an event of somebody else meanwhile, which CUDA refuses while it records.
        gc.disable()
        try:
            return [self._recorded(work, pool) for work in works]
        except RuntimeError:
            _end(self._stream.device, pool)
            raise
        finally:
            # A recording that fails may leave the side stream current.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()

    def _recorded(self, work: Work, pool: Any) -> Work:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks events in a thread of its own, which only this mode allows.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()
        return functools.partial(_replayed, graph, output)


def _replayed(graph: torch.cuda.CUDAGraph, output: Tensor) -> Tensor:
    graph.replay()
    return output


def _end(device: torch.device, pool: Any) -> None:
    """Let the allocator leave ``pool``, which it does not if CUDA refuses a recording at its end.

    Releases of torch whose CUDAGraph.capture_end raises before it tells the allocator leave one that frees no cached
    memory any more; in others there is nothing to end.
    """
    with contextlib.suppress(RuntimeError):
        torch.cuda.memory._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
        torch.cuda.memory._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: a library's workspace stays with the stream that it was allocated for."""
    return torch.cuda.Stream(device)


def recorder_of(device: torch.device) -> CudaGraphs | None:
    """What records on ``device``; None where work is simply done again."""
    return CudaGraphs(device) if device.type == "cuda" else None
