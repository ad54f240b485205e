"""Tokenize pieces in worker processes, in input order.

Threads of the standard library's executor each wait for a worker that has a pipe of its own, which ends when the worker
does: one that is killed is noticed at once. Workers of ``concurrent.futures.ProcessPoolExecutor`` share their queues;
one that is killed while it writes leaves half a message there, for the rest of which the executor waits for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, TypeAlias

from lightning_megatron.data.corpus.encoder import EncodedPiece
from lightning_megatron.data.corpus.pieces import Piece
from lightning_megatron.errors import ConfigError

Encode: TypeAlias = Callable[[Piece], EncodedPiece]

PENDING_A_WORKER = 4
"""Pieces begun at a time: so many that a slow one does not stop the others, so few that memory stays constant."""


@contextlib.contextmanager
def encode_all(pieces: Iterator[Piece], encode: Encode, workers: int) -> Iterator[Iterator[EncodedPiece]]:
    """The tokens of each piece in input order, encoded here or by ``workers`` processes, which end with the context."""
    with _one_thread_each():
        if workers == 1:
            yield map(encode, pieces)
            return
        started: list[_Worker] = []
        try:
            for _ in range(workers):
                started.append(_Worker(encode))
        except OSError as error:
            _end(started)
            raise ConfigError(
                f"workers={workers} cannot all be started ({error.strerror}); choose fewer, e.g. this machine's"
                f" {os.cpu_count()} cores"
            ) from error
        threads = ThreadPoolExecutor(workers)
        try:
            yield _in_order(pieces, started, threads)
        finally:
            _end(started)  # whereupon no thread waits for one
            threads.shutdown(cancel_futures=True)


def _in_order(pieces: Iterator[Piece], workers: list[_Worker], threads: ThreadPoolExecutor) -> Iterator[EncodedPiece]:
    idle = SimpleQueue[_Worker]()
    for worker in workers:
        idle.put(worker)

    def encoded(piece: Piece) -> EncodedPiece:
        worker = idle.get()
        try:
            return worker.encode(piece)
        finally:
            idle.put(worker)

    pending = deque[Future[EncodedPiece]]()
    for piece in pieces:
        pending.append(threads.submit(encoded, piece))
        if len(pending) == PENDING_A_WORKER * len(workers):
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Worker:
    """A process that encodes one piece at a time."""

    def __init__(self, encode: Encode) -> None:
        # Fork shares what is loaded, the tokenizer included; macOS libraries do not survive it.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(encode, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that its end ends the pipe

    def encode(self, piece: Piece) -> EncodedPiece:
        """What becomes of ``piece``.

        Raises:
            RuntimeError: If the process was killed, or has failed for a reason that is no user's mistake.
        """
        try:
            self._connection.send(piece)
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise RuntimeError(
                f"a tokenizing worker ended with exit code {self.process.exitcode}; -9 is often for its memory: use"
                " fewer workers"
            ) from error
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, EncodedPiece)
        return result


def _end(workers: list[_Worker]) -> None:
    """At once: they have nothing to lose."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _work(encode: Encode, connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs only in workers"
    # A killed parent cannot end its workers; its end of the pipe lives on in those that were started later.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while connection in wait([connection, parent.sentinel]):
            piece = connection.recv()
            try:
                result: EncodedPiece | Exception = encode(piece)
            except ConfigError as error:
                result = error
            except Exception:
                result = RuntimeError(f"a tokenizing worker failed:\n{traceback.format_exc()}")
            connection.send(result)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """The workers are the parallelism; the tokenizers library would take all cores of the machine in each of them."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
