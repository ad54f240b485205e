"""When may a rank act on a signal? Between two batches, on all ranks at once, and never inside a collective.

A signal handler runs wherever the program happens to be, which on a Megatron rank is nearly always in the middle of
some communication. Lightning's handlers communicate themselves (2.6.6, trainer/connectors/signal_connector.py: SIGTERM
broadcasts, SLURM's requeue signal saves a checkpoint), and ranks that are at different places then wait for each other
for ever. Here the signal is only noted. The handlers that were registered run later, at the same place on all ranks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class DeferredSignals:
    """Notes signals and delivers them to their handlers where every rank has come to."""

    def __init__(self, signums: Iterable[int], group: dist.ProcessGroup) -> None:
        """Defer ``signums``; nothing changes before the first ``deliver``.

        Args:
            signums: Signals whose handlers communicate.
            group: All ranks, over gloo: the question must not wait for a GPU.
        """
        self._signums = tuple(signums)
        self._group = group
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: set[int] = set()
        self._question: tuple[dist.Work, torch.Tensor] | None = None
        self._stand_in = self._note

    def deliver(self, done: bool = False) -> bool:
        """Run the handlers of signals that any rank had noted at the call before; every rank must call.

        The answer travels while the batch in between is worked on, so nothing waits for it.

        Args:
            done: Something that this rank has to say to the others.

        Returns:
            Whether all ranks said ``done`` at the call before.
        """
        self.stand_in_for_handlers()
        all_done, signums = self._agreed(done)
        for signum in signums:
            self._handlers[signum](signum, None)
        return all_done

    def stand_in_for_handlers(self) -> None:
        """Take the place of handlers that Lightning has registered since; it puts back what was there before itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            handler = signal.getsignal(signum)
            if callable(handler) and handler is not self._stand_in:
                self._handlers[signum] = handler
                signal.signal(signum, self._stand_in)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted.add(signum)

    def _agreed(self, done: bool) -> tuple[bool, list[int]]:
        all_done, signums = False, []
        if self._question is not None:
            work, flags = self._question
            work.wait()
            some_not_done, *noted = flags.tolist()
            all_done = not some_not_done
            signums = [signum for signum, flag in zip(self._signums, noted, strict=True) if flag]
        flags = torch.tensor([not done, *(signum in self._noted for signum in self._signums)], dtype=torch.uint8)
        self._noted.clear()
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._question = (work, flags)
        return all_done, [signum for signum in signums if signum in self._handlers]
