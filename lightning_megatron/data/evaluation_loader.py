"""Wrapper of ordinary DataLoaders for evaluation, in which every sample counts once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_megatron.data.loader import PADDING_ROW


class EvaluationLoader:
    """A validation or test DataLoader in which every sample counts once.

    ``DistributedSampler`` repeats samples so that all ranks have the same number; repeated rows get loss weight 0.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap ``loader``, whose sampler may be a ``DistributedSampler``."""
        self.loader = loader
        # Read by Lightning and callbacks.
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.sampler = loader.sampler
        self.batch_sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        num_seen = 0
        # A resumed run may skip a validation that was due (Lightning does), and must keep the same random state.
        with torch.random.fork_rng(devices=[]):
            batches = iter(self.loader)
        for batch in batches:
            rows = _num_rows(batch)
            # An item of a dataset of batches is one sample with several rows.
            samples = 1 if self.loader.batch_sampler is None else rows
            mask = self._first_visits(num_seen, samples)
            num_seen += samples
            if not bool(mask.all()):
                batch = {**batch, "sample_mask": batch.get("sample_mask", torch.ones(rows)) * mask}
            yield batch

    def _first_visits(self, num_seen: int, samples: int) -> torch.Tensor:
        """1 for each sample at its first visit in the epoch's order, 0 for repetitions: [samples], fp32."""
        sampler = self.loader.sampler
        if not isinstance(sampler, DistributedSampler):
            return torch.ones(samples)
        positions = (num_seen + torch.arange(samples)) * sampler.num_replicas + sampler.rank
        num_samples: int = len(sampler.dataset)  # type: ignore[arg-type]
        return (positions < num_samples).float()

    def batch_indices(self) -> Iterator[list[int]]:
        """Sample indices of each batch of the last pass, ``PADDING_ROW`` for repetitions.

        For a dataset of batches, their indices. In prediction, Lightning's batch sampler records them.
        """
        batch_sampler = self.loader.batch_sampler
        seen: Any = getattr(batch_sampler, "seen_batch_indices", None)
        if seen is None:
            seen = batch_sampler
        if seen is None:
            seen = ([index] for index in self.loader.sampler)
        num_seen = 0
        for samples in seen:
            mask = self._first_visits(num_seen, len(samples))
            num_seen += len(samples)
            yield [
                sample if is_first else PADDING_ROW
                for sample, is_first in zip(samples, mask.tolist(), strict=True)
            ]


def _num_rows(batch: Any) -> int:
    if not isinstance(batch, dict):
        return 0
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    if not tensors:
        return 0
    return tensors[0].shape[0]
