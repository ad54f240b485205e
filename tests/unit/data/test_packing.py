"""Do packed samples fit, is none lost, and are the rows as few as best-fit-decreasing finds?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_megatron.data.instructions import Packing, efficiency, pack

CAPACITY = 20
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60).map(lambda lengths: np.array(lengths, dtype=np.int64))


def _contents(packing: Packing) -> list[list[int]]:
    return [part.tolist() for part in np.split(packing.members, packing.starts[1:-1])][: packing.num_rows]


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
    rows = _contents(pack(lengths, CAPACITY, seed))
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    found = sorted([int(lengths[member]) for member in row] for row in rows)
    # Which of several equally full rows comes first is free, and does not change the number of rows or their fill.
    expected = _best_fit_decreasing(lengths.tolist())
    assert sorted(map(sum, found)) == sorted(map(sum, expected))


def test_rows_and_equal_samples_are_shuffled_by_the_seed() -> None:
    lengths = np.random.default_rng(3).integers(1, CAPACITY + 1, 500)
    one, again, other = (pack(lengths, CAPACITY, seed) for seed in (1, 1, 2))
    assert _contents(one) == _contents(again)
    assert sorted(_contents(one)) != sorted(_contents(other))
    # Not the rows with the longest samples first, as they were found.
    longest = [max(lengths[row]) for row in _contents(one)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3
    assert efficiency(one, lengths, CAPACITY) == lengths.sum() / (one.num_rows * CAPACITY) > 0.98


@pytest.mark.parametrize("length", [0, CAPACITY + 1])
def test_a_sample_that_fits_no_row_is_not_packed(length: int) -> None:
    with pytest.raises(ValueError, match="not all in 1..20"):
        pack(np.array([3, length]), CAPACITY, seed=0)
