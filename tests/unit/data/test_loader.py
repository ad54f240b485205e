"""Training loaders: each sample is read once at any layout, also after a resume; workers change nothing."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron.data.batch_shape import BatchShape
from lightning_megatron.data.loader import PassLoader, PassOrder, TrainLoader
from lightning_megatron.data.resumable import ResumableLoader
from lightning_megatron.data.samples import Rows
from lightning_megatron.errors import DataError
from tests.recording import recorded_warnings


def _shape(
    mbs: int,
    num: int,
    dp: int = 1,
    rank: int = 0,
) -> BatchShape:
    return BatchShape(
        micro_batch_size=mbs, num_microbatches=num, data_parallel_size=dp, data_parallel_rank=rank
    )


def _loader(shape: BatchShape) -> TrainLoader:
    return TrainLoader(None, PassOrder(200, 5, "later passes"), shape, None, 0)


LAYOUTS = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)


@settings(deadline=None)
@given(
    before=LAYOUTS,
    after=LAYOUTS,
    done=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_resume_at_any_layout_continues_with_the_next_sample(
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    done: int,
    epoch: int,
) -> None:
    first = _loader(_shape(*before))
    one_row = _loader(_shape(1, 1))
    for loader in (first, one_row):
        loader.set_epoch(epoch)
    order = [index for batch in one_row.batches() for index in batch]
    for _ in range(done):
        first.advance()

    per_rank = []
    for rank in range(after[2]):
        loader = _loader(_shape(*after, rank=rank))
        loader.seek(vars(first.position))
        per_rank.append(list(loader.batches()))
        assert len(loader) == done + len(per_rank[-1])

    consumed = first.position.consumed_samples
    resumed: list[int] = []
    for step in zip(*per_rank, strict=True):
        for rank_indices in step:
            resumed += rank_indices
    assert sorted(resumed) == sorted(order[consumed : consumed + len(resumed)])
    assert 200 - consumed - len(resumed) < _shape(*after).global_batch_size


class RandomSamples:
    """Rows with their index and a random value."""

    fingerprint = "random"

    def __len__(self) -> int:
        return 10

    def rows(self, indices: Sequence[int]) -> Rows:
        return {"number": torch.tensor(indices), "random": torch.rand(len(indices))}


def _random_loader(rank: int, epoch: int, steps: int = 0) -> TrainLoader:
    shape = _shape(1, 1, 2, rank)
    loader = TrainLoader(
        RandomSamples(),
        PassOrder(10, 1, "every pass"),
        shape,
        None,
        1,
    )
    loader.set_epoch(epoch)
    for _ in range(steps):
        loader.advance()
    return loader


def test_worker_randomness_is_reproducible_per_rank_epoch_and_position() -> None:
    def values_of(*key: int) -> list[float]:
        values: list[float] = []
        for batch in _random_loader(*key):
            values += batch["random"].tolist()
        return values

    first = values_of(0, 0)

    assert values_of(0, 0) == first
    flat = [
        *first,
        *values_of(1, 0),
        *values_of(0, 1),
        *values_of(0, 0, 2),
    ]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_error_is_the_same_from_a_worker(num_workers: int) -> None:
    class Damaged(RandomSamples):
        def rows(self, indices: Sequence[int]) -> Rows:
            if 4 in indices:
                raise DataError("item 4 is damaged; correct it")
            return super().rows(indices)

    shape = _shape(2, 1)
    batches = iter(PassLoader(Damaged(), 10, shape, num_workers))

    assert next(batches)["number"].tolist() == [0, 1]
    assert next(batches)["number"].tolist() == [2, 3]
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == "item 4 is damaged; correct it"


class _Batches(BatchSampler):
    """User-defined batch sampler, which Lightning instantiates again."""


def test_custom_batch_sampler_is_reshuffled_each_epoch() -> None:
    def sampler() -> DistributedSampler[int]:
        return DistributedSampler(range(16), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type]

    loader = DataLoader(range(16), batch_sampler=_Batches(sampler(), 2, False))  # type: ignore[arg-type, var-annotated]
    epochs = ResumableLoader(loader, 2, lambda: math.inf)
    for epoch in range(2):
        expected = sampler()
        expected.set_epoch(epoch)
        assert [number for batch in epochs for number in batch.tolist()] == list(expected)


def _rows_of(length: int, batch_size: int, first: int = 0, **options: Any) -> ResumableLoader:
    rows = list(range(first, first + length))
    sampler: DistributedSampler[int] = DistributedSampler(
        rows,  # type: ignore[arg-type]
        num_replicas=2,
        rank=0,
        **options,
    )
    loader: DataLoader[int] = DataLoader(rows, batch_size, sampler=sampler)  # type: ignore[arg-type]
    return ResumableLoader(loader, 2, lambda: math.inf)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (_rows_of(16, 2), ""),
        (_rows_of(16, 1), ""),
        (_rows_of(18, 2), "'length': 18"),
        (_rows_of(16, 2, seed=1), "'seed': 1"),
        (_rows_of(16, 2, shuffle=False), "'shuffle': False"),
        (_rows_of(16, 2, first=1), "'contents': "),
        (_rows_of(16, 3), "The last 2 of the 8 samples before the checkpoint are repeated"),
        (_rows_of(8, 2, seed=1), ""),
    ],
    # Not by the loaders' addresses, which differ between the processes that share the tests.
    ids=[
        "same",
        "half the batch",
        "longer",
        "seed",
        "order",
        "other rows",
        "odd batch",
        "finished epoch",
    ],
)
def test_resume_in_another_order_warns(loader: ResumableLoader, message: str) -> None:
    first = _rows_of(16, 2)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    with recorded_warnings() as messages:
        loader.load_state_dict(first.state_dict())
    assert len(messages) == (message != "")
    assert message in "".join(messages)
