"""Which elements of the optimizer's state go through the device together, and where they lie meanwhile.

State in host memory consists of one array for each name (``param``, ``exp_avg``, ``exp_avg_sq``), in which parameters
lie one behind the other. A bucket is a range of each array: what is copied to a slot on the device, updated there, and
copied back. Plain arithmetic, without tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 64
"""Elements at multiples of which parameters begin and are cut: 256 bytes, which GPU kernels read in large words; and
torch's kernels on CPUs, which compute the rest behind the last full vector in another way, give the same bits."""


class Piece(NamedTuple):
    """Consecutive elements of a parameter."""

    parameter: int
    """Its number."""
    start: int
    stop: int


class Span(NamedTuple):
    """Consecutive elements of an array."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Elements that go through the device together."""

    pieces: tuple[Piece, ...]
    spans: Mapping[str, Span]
    """Range of each array, with what lies between the pieces."""

    @property
    def slots(self) -> dict[str, int]:
        """Where each span begins in a slot, in elements."""
        begins = {}
        begin = 0
        for name, span in self.spans.items():
            begins[name] = begin
            begin += _aligned(span.size)
        return begins

    @property
    def slot_size(self) -> int:
        """Elements of a slot that holds the bucket."""
        return sum(_aligned(span.size) for span in self.spans.values())


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Layout of the arrays in host memory."""

    offsets: tuple[Mapping[str, int], ...]
    """Of each parameter: where it begins in each array that has it."""
    sizes: Mapping[str, int]
    """Elements of each array."""

    def bucket(self, pieces: Sequence[Piece]) -> Bucket:
        """The bucket of consecutive pieces."""
        spans: dict[str, Span] = {}
        for piece in pieces:
            for name, offset in self.offsets[piece.parameter].items():
                begin = offset + piece.start
                first = spans.get(name, Span(begin, begin)).start
                spans[name] = Span(first, offset + piece.stop)
        return Bucket(pieces=tuple(pieces), spans=spans)


def lay_out(sizes: Sequence[int], names: Sequence[Sequence[str]]) -> Arrays:
    """Place parameters one behind the other.

    Args:
        sizes: Elements of each parameter.
        names: Arrays that have it.
    """
    ends: dict[str, int] = {}
    offsets = []
    for size, of_parameter in zip(sizes, names, strict=True):
        begins = {name: ends.get(name, 0) for name in of_parameter}
        offsets.append(begins)
        for name, begin in begins.items():
            ends[name] = begin + _aligned(size)
    return Arrays(offsets=tuple(offsets), sizes=ends)


def cut(sizes: Mapping[int, int], limit: int) -> Iterator[list[Piece]]:
    """Pieces of parameters, in their order, in groups of at most ``limit`` elements.

    Args:
        sizes: Elements of each parameter by its number.
        limit: A multiple of ``ALIGNMENT``.
    """
    pieces: list[Piece] = []
    free = limit
    for index, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + free)
            pieces.append(Piece(index, start, stop))
            free -= _aligned(stop - start)
            start = stop
            if free <= 0:
                yield pieces
                pieces = []
                free = limit
    if pieces:
        yield pieces


def share_of(sizes: Sequence[int], share: float) -> int:
    """How many of the first parameters make up at least ``share`` of all elements."""
    wanted = share * sum(sizes)
    taken = 0
    for count, size in enumerate(sizes):
        if taken >= wanted:
            return count
        taken += size
    return len(sizes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
