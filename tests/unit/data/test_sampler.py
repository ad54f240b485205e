"""Does every sample go to exactly one rank and step, whatever the layout, and is a position the same in all of them?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.loader import (
    BatchRampup,
    BatchShape,
    PassOrder,
    Shuffling,
    TrainLoader,
)
from lightning_megatron.errors import CheckpointError, ConfigError, DataError


def _shape(mbs: int = 2, num: int = 3, dp: int = 1, rank: int = 0, rampup: BatchRampup | None = None) -> BatchShape:
    return BatchShape(
        micro_batch_size=mbs, num_microbatches=num, data_parallel_size=dp, data_parallel_rank=rank, rampup=rampup
    )


def _sampler(
    shape: BatchShape, num_samples: int = 100, max_steps: int | None = None, shuffling: Shuffling = "later passes"
) -> TrainLoader:
    return TrainLoader(None, PassOrder(num_samples, 5, shuffling), shape, max_steps=max_steps)


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
    first = _sampler(_shape(*before), num_samples=200)
    first.set_epoch(epoch)
    order = [index for batch in _sampler_of_one_row(epoch).batches() for index in batch]
    for _ in range(done):
        first.advance()

    per_rank = []
    for rank in range(after[2]):
        sampler = _sampler(_shape(*after, rank=rank), num_samples=200)
        sampler.load_state_dict(first.state_dict())
        per_rank.append(list(sampler.batches()))
        assert len(sampler) == done + len(per_rank[-1])

    whole = [index for step in zip(*per_rank, strict=True) for rank in step for index in rank]
    assert sorted(whole) == sorted(order[first.consumed_samples : first.consumed_samples + len(whole)])
    global_batch = _shape(*after).global_batch_size
    assert 200 - first.consumed_samples - len(whole) < global_batch


def _sampler_of_one_row(epoch: int) -> TrainLoader:
    sampler = _sampler(_shape(1, 1), num_samples=200)
    sampler.set_epoch(epoch)
    return sampler


def test_an_epoch_smaller_than_a_step_is_refused() -> None:
    _sampler(_shape(), num_samples=6)
    with pytest.raises(DataError, match=r"has 5 samples, one step takes 6 \(micro_batch_size=2 x num_microbatches=3"):
        _sampler(_shape(), num_samples=5)


@pytest.mark.parametrize("state", [{}, {"consumed_samples": 3}, {"epoch": 0, "consumed_samples": -1, "steps": 0}])
def test_a_foreign_position_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="needs whole numbers epoch, consumed_samples, steps"):
        _sampler(_shape()).load_state_dict(state)


RAMPUP = BatchRampup(start=4, increment=4, samples=60)


def test_the_batch_grows_as_megatrons_calculator_says() -> None:
    # From 4 to 16 rows in three increments, each after 20 samples: 4 until 20, 8 until 40, 12 until 60, then 16.
    shape = _shape(mbs=2, num=4, dp=2, rampup=RAMPUP)
    consumed, sizes = 0, []
    while len(sizes) < 12:
        sizes.append(shape.at(consumed).global_batch_size)
        consumed += sizes[-1]

    assert sizes == [4, 4, 4, 4, 4, 8, 8, 8, 12, 12, 16, 16]
    assert shape.stages == [1, 2, 3, 4]
    assert [shape.position_after(0, steps) for steps in (0, 5, 9, 12)] == [0, 20, 56, 100]
    assert [shape.steps_in(0, end) for end in (3, 4, 20, 27, 28, 67, 68, 100)] == [0, 1, 5, 5, 6, 9, 10, 12]


def test_a_growing_batch_deals_every_sample_once_over_an_interruption() -> None:
    taken: list[int] = []
    position: dict[str, int] = {"epoch": 0, "consumed_samples": 0, "steps": 0}
    for mbs, num, dp in ((2, 4, 2), (1, 16, 1)):
        samplers = [_sampler(_shape(mbs, num, dp, rank, RAMPUP), num_samples=120) for rank in range(dp)]
        for sampler in samplers:
            sampler.load_state_dict(position)
            assert len(sampler) == 13  # 10 steps to 68 samples, then 84, 100, 116
        for step in zip(*(sampler.batches() for sampler in samplers), strict=True):
            taken += [index for rank in step for index in rank]
            samplers[0].advance()
            if dp == 2 and len(taken) == 36:
                break
        position = samplers[0].state_dict()

    assert sorted(taken) == list(range(116))


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        ((0, 4, 10), "needs three positive numbers"),
        ((16, 4, 10), "must reach the global batch of 16"),
        ((4, 5, 10), "must reach the global batch of 16 .* in whole increments"),
        ((2, 2, 10), "comes to a global batch of 2, which is no multiple of 4"),
    ],
)
def test_an_impossible_ramp_up_is_refused(rampup: tuple[int, int, int], message: str) -> None:
    start, increment, samples = rampup
    shape = _shape(mbs=2, num=4, dp=2, rampup=BatchRampup(start=start, increment=increment, samples=samples))

    with pytest.raises(ConfigError, match=message):
        _ = shape.stages
