"""Do the faces around a DataLoader find what deals its samples, whoever made it?"""

from __future__ import annotations

import math

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron.data.loader import ResumableLoader


class _Batches(BatchSampler):
    """A user's own, which Lightning makes again around its own sampler."""


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
