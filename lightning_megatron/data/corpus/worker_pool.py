"""How do several processes tokenize pieces whose results come back in input order, and end together?

Each worker has a pipe of its own, which ends when the worker does: one that is killed is noticed at once. With the
standard library's executor, whose workers share queues, a run was seen to wait for ever after one of them was killed;
the cause was not established. Half a message in a shared queue, and its lock with it, would have that effect.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from lightning_megatron.data.corpus.encoder import EncodedPiece
from lightning_megatron.data.corpus.pieces import Piece
from lightning_megatron.errors import ConfigError

Encode: TypeAlias = Callable[[Piece], EncodedPiece]

PENDING_A_WORKER = 4
"""Pieces begun at a time: so many that a slow one does not stop the others, so few that memory stays constant."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A piece of work that is finished."""

    path: str
    """The file of the piece; of several text files, none."""
    num_bytes: int
    """Input bytes that it stands for."""
    encoded: EncodedPiece
    """Its tokens."""


@contextlib.contextmanager
def encode_all(pieces: Iterator[Piece], encode: Encode, workers: int) -> Iterator[Iterator[Done]]:
    """The tokens of each piece in input order, encoded here or by ``workers`` processes, which end with the context."""
    with _one_thread_each():
        if workers == 1:
            yield (Done(path=_path(piece), num_bytes=piece.num_bytes, encoded=encode(piece)) for piece in pieces)
            return
        # Fork shares what is loaded, the tokenizer included; macOS libraries do not survive it.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        pool: list[_Worker] = []
        try:
            for _ in range(workers):
                pool.append(_started(context, encode, workers))
            yield _in_order(pool, pieces)
        finally:
            for worker in pool:
                worker.kill()


def _started(context: Any, encode: Encode, workers: int) -> _Worker:
    try:
        return _Worker(context, encode)
    except OSError as error:
        raise ConfigError(
            f"workers={workers} cannot all be started ({error.strerror}); choose fewer, e.g. this machine's"
            f" {os.cpu_count()} cores"
        ) from error


class _Worker:
    """A process that does one piece at a time."""

    def __init__(self, context: Any, encode: Encode) -> None:
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(encode, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that its end ends the pipe
        self.number = -1
        """Of the piece that it has."""

    def send(self, number: int, piece: Piece) -> None:
        """Give it a piece; it has none, so it is reading, and this cannot wait for it for ever."""
        self.number = number
        try:
            self.connection.send(piece)
        except OSError as error:
            raise self._killed() from error

    def receive(self) -> EncodedPiece:
        """What became of its piece.

        Raises:
            RuntimeError: If it was killed, or has failed for a reason that is no user's mistake.
        """
        try:
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._killed() from error
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, EncodedPiece)
        return result

    def kill(self) -> None:
        """End it at once; it has nothing to lose."""
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _killed(self) -> RuntimeError:
        self._process.join()
        return RuntimeError(
            f"a tokenizing worker ended with exit code {self._process.exitcode}; -9 is often for its memory: use fewer"
            " workers"
        )


def _in_order(pool: list[_Worker], pieces: Iterator[Piece]) -> Iterator[Done]:
    max_pending = PENDING_A_WORKER * len(pool)
    idle, busy = list(pool), dict[Connection, _Worker]()
    handed_out: dict[int, tuple[str, int]] = {}  # not the pieces, which may be their content
    results: dict[int, EncodedPiece] = {}
    numbered = enumerate(pieces)
    upcoming = next(numbered, None)
    first = 0
    while upcoming is not None or handed_out:
        while idle and upcoming is not None and upcoming[0] < first + max_pending:
            number, piece = upcoming
            worker = idle.pop()
            worker.send(number, piece)
            busy[worker.connection] = worker
            handed_out[number] = _path(piece), piece.num_bytes
            # Read while all of them work: one that has finished shall not wait for it.
            upcoming = next(numbered, None)
        if first in results:
            path, num_bytes = handed_out.pop(first)
            yield Done(path=path, num_bytes=num_bytes, encoded=results.pop(first))
            first += 1
            continue
        for connection in wait(list(busy)):  # the first one is among them
            assert isinstance(connection, Connection)
            worker = busy.pop(connection)
            results[worker.number] = worker.receive()
            idle.append(worker)


def _path(piece: Piece) -> str:
    path: str = getattr(piece, "path", "")
    return path


def _work(encode: Encode, connection: Connection) -> None:
    # Ctrl-C reaches the whole process group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            piece = connection.recv()
        except EOFError:  # the parent was killed
            return
        try:
            connection.send(encode(piece))
        except ConfigError as error:
            connection.send(error)
        except Exception:
            connection.send(RuntimeError(f"a tokenizing worker failed:\n{traceback.format_exc()}"))


def _exit_with_parent() -> None:
    """A killed parent cannot end its workers, which would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs only in workers"
    parent.join()
    os._exit(1)


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
