"""Every sample goes to one rank and step at any layout, a position means the same in all, workers change nothing."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron.data.loader import BatchShape, PassLoader, PassOrder, ResumableLoader, TrainLoader
from lightning_megatron.data.samples import Rows
from lightning_megatron.errors import DataError


def _shape(mbs: int = 2, num: int = 3, dp: int = 1, rank: int = 0) -> BatchShape:
    return BatchShape(micro_batch_size=mbs, num_microbatches=num, data_parallel_size=dp, data_parallel_rank=rank)


def _loader(shape: BatchShape, num_samples: int = 100) -> TrainLoader:
    return TrainLoader(None, PassOrder(num_samples, 5, "later passes"), shape, None, 0)


LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None)
@given(before=LAYOUTS, after=LAYOUTS, done=st.integers(0, 3), epoch=st.integers(0, 2))
def test_any_layout_goes_on_with_the_next_sample_of_the_epoch(
    before: tuple[int, int, int], after: tuple[int, int, int], done: int, epoch: int
) -> None:
    first, one_row = _loader(_shape(*before), num_samples=200), _loader(_shape(1, 1), num_samples=200)
    for loader in (first, one_row):
        loader.set_epoch(epoch)
    order = [index for batch in one_row.batches() for index in batch]
    for _ in range(done):
        first.advance()

    per_rank = []
    for rank in range(after[2]):
        loader = _loader(_shape(*after, rank=rank), num_samples=200)
        loader.seek(vars(first.position))
        per_rank.append(list(loader.batches()))
        assert len(loader) == done + len(per_rank[-1])

    consumed = first.position.consumed_samples
    whole = [index for step in zip(*per_rank, strict=True) for rank in step for index in rank]
    assert sorted(whole) == sorted(order[consumed : consumed + len(whole)])
    assert 200 - consumed - len(whole) < _shape(*after).global_batch_size


class RandomSamples:
    """Each row has its number, and a number drawn at random."""

    fingerprint = "random"

    def __len__(self) -> int:
        return 10

    def rows(self, indices: Sequence[int]) -> Rows:
        return {"number": torch.tensor(indices), "drawn": torch.rand(len(indices))}


def _random_loader(rank: int, epoch: int, steps: int = 0) -> TrainLoader:
    shape = _shape(1, 1, 2, rank)
    loader = TrainLoader(RandomSamples(), PassOrder(10, 1, "every pass"), shape, None, 1)
    loader.set_epoch(epoch)
    for _ in range(steps):
        loader.advance()
    return loader


def test_what_workers_draw_differs_between_epochs_copies_and_resumes_and_is_the_same_again() -> None:
    drawn = {
        place: torch.cat([batch["drawn"] for batch in _random_loader(*place)]).tolist()
        for place in ((0, 0), (1, 0), (0, 1), (0, 0, 2))
    }

    assert drawn[0, 0] == torch.cat([batch["drawn"] for batch in _random_loader(0, 0)]).tolist()
    numbers = [number for each in drawn.values() for number in each]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_wrong_with_the_data_is_said_alike_by_a_worker(num_workers: int) -> None:
    class Damaged(RandomSamples):
        def rows(self, indices: Sequence[int]) -> Rows:
            if 4 in indices:
                raise DataError("item 4 is damaged; correct it")
            return super().rows(indices)

    shape = _shape(2, 1)
    batches = iter(PassLoader(Damaged(), 10, shape, num_workers))

    assert [next(batches)["number"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == "item 4 is damaged; correct it"


class _Batches(BatchSampler):
    """A user's own, which Lightning makes again around its own loader."""


def test_a_batch_sampler_of_ones_own_shuffles_each_epoch_anew() -> None:
    def dealt() -> DistributedSampler[int]:
        return DistributedSampler(range(16), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type]

    numbers = range(16)
    loader = DataLoader(numbers, batch_sampler=_Batches(dealt(), 2, False))  # type: ignore[arg-type, var-annotated]
    epochs = ResumableLoader(loader, 2, lambda: math.inf)
    for epoch in range(2):
        expected = dealt()
        expected.set_epoch(epoch)
        assert [number for batch in epochs for number in batch.tolist()] == list(expected)
