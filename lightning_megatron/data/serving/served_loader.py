"""How do rows reach the Trainer: loaders that know their place in the run, and stand-ins on ranks that read nothing?

They are not ``torch.utils.data.DataLoader`` objects, so Lightning leaves their sampling alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.data.samples.gpt import IndexedSamples
from lightning_megatron.data.serving.sampler import BatchShape, TrainSampler, evaluation_batches, num_evaluation_steps


class IndexedTrainLoader:
    """Batches ``{"text": int64 [rows, seq_length + 1]}`` from the sampler's position on; resumes at the exact step."""

    def __init__(
        self, samples: IndexedSamples | None, sampler: TrainSampler, shape: BatchShape, num_workers: int
    ) -> None:
        """Bind the parts.

        Args:
            samples: Open samples; None on a rank that gets its batches from another one.
            sampler: Place in the run; Lightning calls its ``set_epoch``.
            shape: How a step is dealt.
            num_workers: Processes that read ahead.
        """
        self.sampler = sampler
        self._samples = samples
        self._shape = shape
        self._num_workers = num_workers

    def __len__(self) -> int:
        """Steps of the whole epoch, those before a resume included."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Go on from the position that the sampler has when the first batch is asked for.

        Lightning may make the iterator before it restores the position.
        """
        batches = self.sampler.batches()
        for batch in _read(self._samples, batches, self._shape, self._num_workers):
            # Counted before it is handed out, so that a checkpoint written during the step has it.
            self.sampler.advance()
            batch.pop("sample_mask", None)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, for Lightning's fit loop."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.sampler.load_state_dict(state_dict)


class IndexedEvaluationLoader:
    """One pass over a split, each time.

    Batches are ``{"text": int64 [rows, seq_length + 1], "sample_mask": float32 [rows]}``; the last one is filled up
    with rows of -1 whose mask is 0.
    """

    def __init__(self, samples: IndexedSamples | None, num_samples: int, shape: BatchShape, num_workers: int) -> None:
        """Bind the parts.

        Args:
            samples: Open samples; None on a rank that gets its batches from another one.
            num_samples: Samples of the split, known on every rank.
            shape: How a step is dealt.
            num_workers: Processes that read ahead.
        """
        self._samples = samples
        self._num_samples = num_samples
        self._shape = shape
        self._num_workers = num_workers

    def __len__(self) -> int:
        return num_evaluation_steps(self._num_samples, self._shape)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = evaluation_batches(self._num_samples, self._shape)
        yield from _read(self._samples, batches, self._shape, self._num_workers)


def _read(
    samples: IndexedSamples | None, batches: Iterator[list[int]], shape: BatchShape, num_workers: int
) -> Iterator[dict[str, Tensor]]:
    if samples is None:
        # Its content is replaced by the source rank's batch; the rows tell Lightning the batch size.
        placeholder = torch.empty((shape.rows, 0), dtype=torch.int64)
        return ({"text": placeholder} for _ in batches)
    # A generator of its own: the loader draws a seed for its workers, which must not advance the state that dropout
    # uses, on this rank alone and at another step after a resume.
    private = torch.Generator()
    return iter(DataLoader(samples, batch_size=None, sampler=batches, num_workers=num_workers, generator=private))
