"""Are ranges of a tensor's numbers cut into boxes that are those numbers, in their order, and few?"""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.engine.optimizer_state import boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_boxes_are_the_numbers_of_the_range_in_their_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(0, count))
    numbers = torch.arange(count).view(shape)

    found = boxes(tuple(shape), start, stop)

    for _, size in found:
        assert all(length > 0 for length in size)
    cut = [numbers[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *cut]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def test_whole_rows_are_one_box() -> None:
    assert boxes((4, 3), 0, 12) == [((0, 0), (4, 3))]
    assert boxes((4, 3), 3, 9) == [((1, 0), (2, 3))]
    assert boxes((4, 3), 2, 10) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert boxes((4, 3), 4, 5) == [((1, 1), (1, 1))]
