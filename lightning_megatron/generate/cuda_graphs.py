"""Capture of forward passes as CUDA graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError

Work = Callable[[], Tensor]
"""Forward pass of a chunk over a group of rows. In static steps it uses tensors at fixed addresses, and the host
decides nothing by their values."""


class CudaGraphs:
    """Captures work as CUDA graphs; all their memory is freed when the returned functions are dropped."""

    def __init__(self, device: torch.device) -> None:
        """Capture on ``device``."""
        self._stream = _side_stream(device)

    def warm_up(self, work: Work) -> Tensor:
        """Run the work once as it will be captured, so that everything is compiled and allocated.

        It runs on the capture stream, for which libraries have workspaces of their own.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        # The output's memory is reused on the side stream alone, which waits for the output's readers first.
        current.wait_stream(self._stream)
        return output

    def capture(self, works: Sequence[Work]) -> list[Work]:
        """Return each work as a function that replays its graph and returns the same tensor, overwritten.

        The graphs share one memory pool, so they must not run at the same time.

        Raises:
            ConfigError: If one cannot be captured.
        """
        pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        current = torch.cuda.current_stream(self._stream.device)
        # Garbage collection could free other graphs or events, which CUDA refuses during a capture.
        gc.disable()
        try:
            return [self._capture(work, pool) for work in works]
        except RuntimeError as error:
            # The error that ended the capture, not the one of ending it improperly; without CUDA's lines of advice.
            reason = str(error.__context__ or error).partition("\n")[0]
            raise ConfigError(
                f"static_cache: expected steps that CUDA can capture as a graph, got: {reason}; set static_cache=False"
            ) from error
        finally:
            # A failed capture may leave the side stream current.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()

    def _capture(self, work: Work, pool: Any) -> Work:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events in its own thread, which only this mode allows.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all calls: a library's workspace stays with the stream that it was allocated for."""
    return torch.cuda.Stream(device)


def graph_recorder(device: torch.device) -> CudaGraphs | None:
    """Recorder of graphs for ``device``; None where there are none and steps run eagerly."""
    if device.type != "cuda":
        return None
    return CudaGraphs(device)
