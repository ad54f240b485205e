"""Signals that are recorded at once, and handled on all ranks at the same step.

A signal handler interrupts the program anywhere, which on a Megatron rank is nearly always in the middle of some
communication. Lightning's handlers communicate themselves (trainer/connectors/signal_connector.py: SIGTERM broadcasts,
SLURM's requeue signal saves a checkpoint), so ranks that were interrupted at different points would deadlock. Here a
signal is only recorded; the registered handlers run between two batches, on all ranks at the same step.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment


class DeferredSignals:
    """Records signals, and runs their handlers later, on all ranks at the same step."""

    def __init__(self, environment: ClusterEnvironment, group: dist.ProcessGroup) -> None:
        """Defer the signals for which Lightning registers communicating handlers, from the first ``deliver`` on.

        Args:
            environment: SLURM's adds its requeue signal.
            group: Process group of all ranks over gloo, which does not wait for a GPU.
        """
        self._signums: tuple[int, ...] = (signal.SIGTERM,)
        if (
            isinstance(environment, SLURMEnvironment)
            and environment.auto_requeue
            and environment.requeue_signal
        ):
            self._signums += (environment.requeue_signal,)
        self._group = group
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._received: set[int] = set()
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        """All-reduce of the previous ``deliver``, and its flags."""
        self.is_delivering = False
        """Whether handlers are running."""

    def deliver(self, done: bool = False) -> bool:
        """Run the handlers of signals that any rank had received at the previous call; every rank must call.

        The flags are reduced while the batch between two calls is computed, so nothing waits for them.

        Args:
            done: A flag that is reduced over all ranks along with the signals.

        Returns:
            Whether all ranks passed ``done`` at the previous call.
        """
        self._replace_handlers()
        all_done = False
        received: list[int] = []
        if self._pending is not None:
            work, flags = self._pending
            work.wait()
            any_not_done, *are_received = flags.tolist()
            all_done = not any_not_done
            received = list(itertools.compress(self._signums, are_received))
        own = [signum in self._received for signum in self._signums]
        flags = torch.tensor([not done, *own], dtype=torch.uint8)
        self._received.clear()
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, flags)
        self.is_delivering = True
        try:
            for signum in received:
                if signum in self._handlers:
                    self._handlers[signum](signum, None)
        finally:
            self.is_delivering = False
        return all_done

    def _replace_handlers(self) -> None:
        """Replace the handlers that Lightning has registered since; Lightning itself restores the original ones."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            handler = signal.getsignal(signum)
            if callable(handler) and handler != self._record:
                self._handlers[signum] = handler
                signal.signal(signum, self._record)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._received.add(signum)
