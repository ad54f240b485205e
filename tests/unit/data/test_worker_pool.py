"""Do pieces come back in order, from no more processes than asked, and is a failure told as it was?"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Iterator

import pytest

from lightning_megatron.data.corpus.encoder import EncodedPiece
from lightning_megatron.data.corpus.pieces import LineBlock, Piece
from lightning_megatron.data.corpus.worker_pool import PENDING_A_WORKER, encode_all
from lightning_megatron.errors import ConfigError, DataError


def _encode(piece: Piece) -> EncodedPiece:
    """A piece whose ``num_units`` is its number; every fifth one takes longer."""
    assert isinstance(piece, LineBlock)
    if piece.lines == b"bad":
        raise DataError("wrong input")
    if piece.lines == b"defect":
        raise KeyError("a defect")
    time.sleep(0.01 if piece.num_bytes % 5 == 0 else 0)
    return EncodedPiece(keys=[], num_documents=os.getpid(), bad=[], num_bad=0, num_units=piece.num_bytes)


def _pieces(count: int, lines: bytes = b"x" * 300_000) -> Iterator[LineBlock]:
    """Larger than a pipe's buffer."""
    for number in range(count):
        yield LineBlock(path=f"file {number}", lines=lines, num_bytes=number)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_results_come_in_order_from_that_many_processes(workers: int, count: int) -> None:
    with encode_all(_pieces(count), _encode, workers) as encoded:
        done = list(encoded)

    assert [each.encoded.num_units for each in done] == list(range(count))
    assert [(each.path, each.num_bytes) for each in done] == [(f"file {n}", n) for n in range(count)]
    processes = {each.encoded.num_documents for each in done}
    assert len(processes) <= workers
    assert (os.getpid() in processes) == (workers == 1 and count > 0)
    assert multiprocessing.active_children() == []


def test_no_more_pieces_are_read_than_are_worked_on() -> None:
    read = 0

    def counted() -> Iterator[Piece]:
        nonlocal read
        for piece in _pieces(100, b""):
            read += 1
            yield piece

    with encode_all(counted(), _encode, 2) as encoded:
        for number, _ in enumerate(encoded):
            assert read <= number + 2 * PENDING_A_WORKER + 1


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [(b"bad", DataError, "^wrong input$"), (b"defect", RuntimeError, "KeyError: 'a defect'")],
)
def test_a_workers_failure_is_raised_here_and_ends_all(lines: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message), encode_all(_pieces(9, lines), _encode, 3) as encoded:
        list(encoded)
    assert multiprocessing.active_children() == []


def test_more_workers_than_can_be_started_are_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with (
            pytest.raises(ConfigError, match=r"workers=40 cannot all be started \(Too many open files\); choose fewer"),
            encode_all(_pieces(1), _encode, 40),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert multiprocessing.active_children() == []


def test_leaving_early_ends_workers_that_are_busy() -> None:
    with encode_all(_pieces(1000), _encode, 3) as encoded:
        next(encoded)
    assert multiprocessing.active_children() == []
