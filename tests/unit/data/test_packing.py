"""Packed samples fit, none is lost, and rows are as few as best-fit-decreasing finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_megatron.data.instructions import pack

CAPACITY = 20
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60).map(lambda lengths: np.array(lengths, dtype=np.int64))


def _contents(lengths: NDArray[np.int64], seed: int) -> list[list[int]]:
    members, starts = pack(lengths, CAPACITY, seed)
    return [part.tolist() for part in np.split(members, starts[1:-1])][: len(starts) - 1]


def _best_fit_decreasing(lengths: list[int]) -> list[list[int]]:
    """The lengths in each row, one sample at a time."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= CAPACITY]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(lengths=LENGTHS, seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_best_fit_decreasing(lengths: NDArray[np.int64], seed: int) -> None:
    rows = _contents(lengths, seed)
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    found = sorted([int(lengths[member]) for member in row] for row in rows)
    # Which of several equally full rows comes first is free, and does not change the number of rows or their fill.
    expected = _best_fit_decreasing(lengths.tolist())
    assert sorted(map(sum, found)) == sorted(map(sum, expected))


def test_rows_and_equal_samples_are_shuffled_by_the_seed() -> None:
    lengths = np.random.default_rng(3).integers(1, CAPACITY + 1, 500)
    one, again, other = (_contents(lengths, seed) for seed in (1, 1, 2))
    assert one == again
    assert sorted(one) != sorted(other)
    # Not the rows with the longest samples first, as they were found.
    longest = [max(lengths[row]) for row in one]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3
    assert lengths.sum() / (len(one) * CAPACITY) > 0.98
