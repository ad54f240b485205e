"""How do samples of different lengths share rows of one length? Bin packing, as pure functions of arrays.

A packing lists the samples of every row. Samples in rows of their own are the packing with one sample a row, so what
builds rows from a packing serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which samples are in which row."""

    members: NDArray[np.int64]
    """[samples]: numbers of samples, row by row."""
    starts: NDArray[np.int64]
    """[rows + 1]: row ``r`` has ``members[starts[r]:starts[r + 1]]``."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.starts) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        """Numbers of the samples of one row."""
        return self.members[self.starts[index] : self.starts[index + 1]]


def one_sample_a_row(num_samples: int) -> Packing:
    """Sample ``i`` alone in row ``i``."""
    return Packing(members=np.arange(num_samples), starts=np.arange(num_samples + 1))


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> Packing:
    """As few rows as best-fit-decreasing finds, in an order drawn from ``seed``.

    The longest sample first, each into the fullest row that still has room for it: at most 11/9 of the fewest possible
    rows and a constant (Johnson, Near-optimal bin packing algorithms, 1973). Samples of one length are placed together,
    as many at a time as there are equally full rows, so the work grows with the number of different lengths.

    Args:
        lengths: [samples], each from 1 to ``capacity``.
        capacity: Tokens of a row.
        seed: Of the order of rows, and of which of several equally long samples share a row.

    Raises:
        ValueError: If a length is out of range.
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} are not all in 1..{capacity}")
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(len(lengths))
    by_length = drawn[np.argsort(-lengths[drawn].astype(np.int64), kind="stable")]
    row_of, num_rows = _rows_of(lengths[by_length], capacity)
    row_of = generator.permutation(num_rows)[row_of]
    return Packing(
        members=by_length[np.argsort(row_of, kind="stable")],
        starts=np.concatenate([[0], np.bincount(row_of, minlength=num_rows).cumsum()]).astype(np.int64),
    )


def efficiency(packing: Packing, lengths: NDArray[np.integer], capacity: int) -> float:
    """Fraction of the rows' tokens that is no padding."""
    return float(lengths[packing.members].sum(dtype=np.int64) / (packing.num_rows * capacity))


def _rows_of(lengths: NDArray[np.integer], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The row of each sample, and the number of rows; ``lengths`` descend."""
    row_of = np.empty(len(lengths), dtype=np.int64)
    # Rows by the room that they have left; a row with less room than the shortest sample may stay anywhere.
    with_room: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]
    has_room = np.zeros(capacity + 1, dtype=np.bool_)
    num_rows, placed = 0, 0
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = placed + count
        while placed < end:
            fits = np.flatnonzero(has_room[size:])
            room = size + int(fits[0]) if len(fits) else capacity
            # The row that takes one sample is then the fullest with room, so it takes as many as it can.
            each = room // size
            needed = -(-(end - placed) // each)
            if len(fits):
                rows = np.concatenate(with_room[room])
                rows, left = rows[:needed], rows[needed:]
                with_room[room] = [left] if len(left) else []
                has_room[room] = len(left) > 0
            else:
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            taken = min(end - placed, len(rows) * each)
            row_of[placed : placed + taken] = np.repeat(rows, each)[:taken]
            placed += taken
            last = taken - (len(rows) - 1) * each
            _put(with_room, has_room, room - each * size, rows[:-1])
            _put(with_room, has_room, room - last * size, rows[-1:])
    return row_of, num_rows


def _put(
    with_room: list[list[NDArray[np.int64]]], has_room: NDArray[np.bool_], room: int, rows: NDArray[np.int64]
) -> None:
    if len(rows):
        with_room[room].append(rows)
        has_room[room] = True
