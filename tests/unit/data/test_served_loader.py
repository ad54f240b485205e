"""Are batches those of the sampler, whoever reads them, and is what workers draw at random drawn anew?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lightning_megatron.data.loader import BatchShape, PassLoader, PassOrder, TrainLoader
from lightning_megatron.data.samples import Rows
from lightning_megatron.errors import DataError


class RandomSamples:
    """Each row has its number, and a number drawn at random."""

    fingerprint = "random"

    def __len__(self) -> int:
        return 10

    def rows(self, indices: Sequence[int]) -> Rows:
        return {"number": torch.tensor(indices), "drawn": torch.rand(len(indices))}


def _loader(rank: int, epoch: int, steps: int = 0, num_workers: int = 1) -> TrainLoader:
    shape = BatchShape(micro_batch_size=1, num_microbatches=1, data_parallel_size=2, data_parallel_rank=rank)
    loader = TrainLoader(RandomSamples(), PassOrder(10, 1, "every pass"), shape, num_workers=num_workers)
    loader.set_epoch(epoch)
    for _ in range(steps):
        loader.advance()
    return loader


def test_what_workers_draw_differs_between_epochs_copies_and_resumes_and_is_the_same_again() -> None:
    drawn = {
        place: torch.cat([batch["drawn"] for batch in _loader(*place)]).tolist()
        for place in ((0, 0), (1, 0), (0, 1), (0, 0, 2))
    }

    assert drawn[0, 0] == torch.cat([batch["drawn"] for batch in _loader(0, 0)]).tolist()
    numbers = [number for each in drawn.values() for number in each]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_last_batch_is_filled_up_with_rows_that_do_not_count(num_workers: int) -> None:
    shape = BatchShape(micro_batch_size=2, num_microbatches=2, data_parallel_size=1, data_parallel_rank=0)
    batches = list(PassLoader(RandomSamples(), 10, shape, num_workers))

    assert [batch["number"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert [batch["sample_mask"].tolist() for batch in batches] == [[1.0] * 4, [1.0] * 4, [1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_wrong_with_the_data_is_said_alike_by_a_worker(num_workers: int) -> None:
    class Damaged(RandomSamples):
        def rows(self, indices: Sequence[int]) -> Rows:
            if 4 in indices:
                raise DataError("item 4 is damaged; correct it")
            return super().rows(indices)

    shape = BatchShape(micro_batch_size=2, num_microbatches=1, data_parallel_size=1, data_parallel_rank=0)
    batches = iter(PassLoader(Damaged(), 10, shape, num_workers))

    assert [next(batches)["number"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError) as error:
        next(batches)
    assert str(error.value) == "item 4 is damaged; correct it"
