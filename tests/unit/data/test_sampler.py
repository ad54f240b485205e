"""Does every sample go to exactly one rank and step, whatever the layout, and is a position the same in all of them?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.serving.sampler import (
    PADDING_ROW,
    BatchShape,
    TrainSampler,
    evaluation_batches,
    num_evaluation_steps,
)
from lightning_megatron.errors import CheckpointError, DataError


def _shape(mbs: int = 2, num: int = 3, dp: int = 1, rank: int = 0) -> BatchShape:
    return BatchShape(micro_batch_size=mbs, num_microbatches=num, data_parallel_size=dp, data_parallel_rank=rank)


def _sampler(shape: BatchShape, num_indexed: int = 100, max_steps: int | None = None) -> TrainSampler:
    return TrainSampler(num_indexed=num_indexed, shape=shape, seed=5, max_steps=max_steps)


def test_a_step_is_dealt_microbatch_by_microbatch() -> None:
    assert _shape(mbs=2, num=2, dp=2, rank=0).positions(100) == [100, 101, 104, 105]
    assert _shape(mbs=2, num=2, dp=2, rank=1).positions(100) == [102, 103, 106, 107]


@settings(deadline=None)
@given(mbs=st.integers(1, 4), num=st.integers(1, 4), dp=st.integers(1, 5), first=st.integers(0, 1000))
def test_ranks_share_a_step_without_gap_or_overlap(mbs: int, num: int, dp: int, first: int) -> None:
    shapes = [_shape(mbs, num, dp, rank) for rank in range(dp)]
    positions = sorted(position for shape in shapes for position in shape.positions(first))

    assert positions == list(range(first, first + shapes[0].global_batch_size))
    assert all(len(shape.positions(first)) == shape.rows for shape in shapes)


def test_the_length_is_that_of_the_whole_epoch_at_every_step() -> None:
    for sampler in (_sampler(_shape(), max_steps=7), _sampler(_shape())):
        length = len(sampler)
        for step in range(length):
            assert len(list(sampler.batches())) == length - step
            sampler.advance()
            assert len(sampler) == length
        assert list(sampler.batches()) == []
    assert length == 100 // 6


def test_batches_are_those_of_the_position_and_do_not_move_it() -> None:
    sampler = _sampler(_shape(), max_steps=4)
    ahead = sampler.batches()
    first, second = next(ahead), next(ahead)
    sampler.advance()

    assert next(sampler.batches()) == second == [6, 7, 8, 9, 10, 11]
    assert first == [0, 1, 2, 3, 4, 5]


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    sampler = _sampler(_shape(mbs=5, num=2))
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append([index for batch in sampler.batches() for index in batch])

    assert epochs[0] == list(range(100))
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_setting_the_current_epoch_keeps_the_position_and_another_begins_it() -> None:
    sampler = _sampler(_shape())
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.state_dict() == {"epoch": 0, "consumed_samples": 6, "steps": 1}
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "consumed_samples": 0, "steps": 0}


def test_a_run_of_max_steps_has_no_epochs() -> None:
    sampler = _sampler(_shape(), max_steps=4)
    sampler.advance()
    sampler.set_epoch(3)

    assert sampler.state_dict() == {"epoch": 0, "consumed_samples": 6, "steps": 1}


@settings(deadline=None)
@given(
    before=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    done=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_any_layout_goes_on_with_the_next_sample_of_the_epoch(
    before: tuple[int, int, int], after: tuple[int, int, int], done: int, epoch: int
) -> None:
    first = _sampler(_shape(*before), num_indexed=200)
    first.set_epoch(epoch)
    order = [index for batch in _sampler_of_one_row(epoch).batches() for index in batch]
    for _ in range(done):
        first.advance()

    per_rank = []
    for rank in range(after[2]):
        sampler = _sampler(_shape(*after, rank=rank), num_indexed=200)
        sampler.load_state_dict(first.state_dict())
        per_rank.append(list(sampler.batches()))
        assert len(sampler) == done + len(per_rank[-1])

    whole = [index for step in zip(*per_rank, strict=True) for rank in step for index in rank]
    assert sorted(whole) == sorted(order[first.consumed_samples : first.consumed_samples + len(whole)])
    global_batch = _shape(*after).global_batch_size
    assert 200 - first.consumed_samples - len(whole) < global_batch


def _sampler_of_one_row(epoch: int) -> TrainSampler:
    sampler = _sampler(_shape(1, 1), num_indexed=200)
    sampler.set_epoch(epoch)
    return sampler


def test_a_run_that_outgrows_its_index_wraps_around() -> None:
    sampler = _sampler(_shape(mbs=4, num=1), num_indexed=6, max_steps=3)

    assert list(sampler.batches()) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def test_an_epoch_smaller_than_a_step_is_refused() -> None:
    _sampler(_shape(), num_indexed=6)
    with pytest.raises(DataError, match=r"has 5 samples, one step takes 6 \(micro_batch_size=2 x num_microbatches=3"):
        _sampler(_shape(), num_indexed=5)


@pytest.mark.parametrize("state", [{}, {"consumed_samples": 3}, {"epoch": 0, "consumed_samples": -1, "steps": 0}])
def test_a_foreign_position_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="needs whole numbers epoch, consumed_samples, steps"):
        _sampler(_shape()).load_state_dict(state)


@settings(deadline=None)
@given(num_samples=st.integers(1, 60), mbs=st.integers(1, 3), num=st.integers(1, 3), dp=st.integers(1, 4))
def test_evaluation_visits_each_sample_once_and_all_ranks_take_as_many_steps(
    num_samples: int, mbs: int, num: int, dp: int
) -> None:
    seen: list[int] = []
    for rank in range(dp):
        shape = _shape(mbs, num, dp, rank)
        batches = list(evaluation_batches(num_samples, shape))
        assert len(batches) == num_evaluation_steps(num_samples, shape) == -(-num_samples // shape.global_batch_size)
        assert all(len(batch) == shape.rows for batch in batches)
        seen += [index for batch in batches for index in batch if index != PADDING_ROW]

    assert sorted(seen) == list(range(num_samples))
