"""How do samples reach the Trainer: loaders that know their place in the run, and stand-ins on ranks that read nothing?

They are not ``torch.utils.data.DataLoader`` objects, so Lightning leaves their sampling alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron.data.samples.base import Rows, Samples
from lightning_megatron.data.serving.batch_shape import BatchShape
from lightning_megatron.data.serving.sampler import (
    PADDING_ROW,
    TrainSampler,
    evaluation_batches,
    num_evaluation_steps,
)
from lightning_megatron.errors import DataError


class TrainLoader:
    """Batches of training samples from the sampler's position on; resumes at the exact step."""

    def __init__(self, samples: Samples | None, sampler: TrainSampler, shape: BatchShape, num_workers: int) -> None:
        """Bind the parts.

        Args:
            samples: Open samples; None on a rank that gets its batches from another one.
            sampler: Place in the run; Lightning calls its ``set_epoch``.
            shape: How a step is dealt.
            num_workers: Processes that read ahead.
        """
        self.sampler = sampler
        self.samples = samples
        """May be replaced before the next iteration."""
        self._shape = shape
        self._num_workers = num_workers
        self.before_batch: Callable[[], None] = lambda: None
        """Called when a batch is asked for: what was handed out before has been trained on."""

    def __len__(self) -> int:
        """Steps of the whole epoch, those before a resume included."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Rows]:
        """Go on from the position that the sampler has when the first batch is asked for.

        Lightning may make the iterator before it restores the position.
        """
        sampler = self.sampler
        # Samples that are drawn at random differ from epoch to epoch, copy to copy, and behind a resume.
        seed = (sampler.order.seed, sampler.epoch, sampler.consumed_samples, self._shape.data_parallel_rank)
        self.before_batch()
        for batch in _read(self.samples, sampler.batches(), self._num_workers, seed):
            # Counted before it is handed out, so that a checkpoint written during the step has it.
            self.sampler.advance()
            yield batch
            self.before_batch()

    def state_dict(self) -> dict[str, Any]:
        """The position, for Lightning's fit loop."""
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.sampler.load_state_dict(state_dict)


class PassLoader:
    """One pass over a split, each time, for validation, test and prediction.

    Batches have a ``sample_mask`` [rows] float32 too: 0 for the rows that fill the last one up.
    """

    def __init__(self, samples: Samples | None, num_samples: int, shape: BatchShape, num_workers: int) -> None:
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

    def samples_of_batches(self) -> Iterator[list[int]]:
        """Which samples each batch of this rank's copy of the model is of; ``PADDING_ROW`` fills the last one up."""
        return evaluation_batches(self._num_samples, self._shape)

    def __iter__(self) -> Iterator[Rows]:
        batches = evaluation_batches(self._num_samples, self._shape)
        seed = (self._shape.data_parallel_rank,)
        return _read(self._samples, batches, self._num_workers, seed, with_sample_mask=True)


class Batches(Dataset[Rows]):
    """Samples by the batch: an item is a batch of rows, and its key the list of their indices."""

    def __init__(self, samples: Samples, with_sample_mask: bool) -> None:
        self._samples = samples
        self._with_sample_mask = with_sample_mask

    def __len__(self) -> int:
        """Samples, not batches."""
        return len(self._samples)

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        """The rows at ``indices``; where there is none stands the first sample, with the weight 0."""
        rows = self._samples.rows([0 if index == PADDING_ROW else index for index in indices])
        if self._with_sample_mask:
            given = torch.tensor([float(index != PADDING_ROW) for index in indices])
            rows = {**rows, "sample_mask": rows["sample_mask"] * given if "sample_mask" in rows else given}
        return rows


class _InWorker(Dataset[Rows | DataError]):
    """The same batches, and an error as an item: the loader would hide its message behind a worker's traceback."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, indices: list[int]) -> Rows | DataError:
        try:
            return self._batches[indices]
        except DataError as error:
            return error


def _raised(items: Iterable[Rows | DataError]) -> Iterator[Rows]:
    for item in items:
        if isinstance(item, DataError):
            raise item
        yield item


def _read(
    samples: Samples | None,
    batches: Iterator[list[int]],
    num_workers: int,
    seed: tuple[int, ...],
    with_sample_mask: bool = False,
) -> Iterator[Rows]:
    if samples is None:
        # Its content is replaced by the source rank's batch; the rows tell Lightning the batch size.
        return ({"rows": torch.empty((len(indices), 0), dtype=torch.int64)} for indices in batches)
    dataset = Batches(samples, with_sample_mask)
    if num_workers == 0:
        return (dataset[indices] for indices in batches)
    # A generator of its own: the loader draws a seed for its workers, which must not advance the state that dropout
    # uses, on this rank alone and at another step after a resume.
    private = torch.Generator()
    private.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    loader = DataLoader(
        _InWorker(dataset),
        batch_size=None,
        sampler=batches,
        num_workers=num_workers,
        generator=private,
        # A thread takes what workers hand over into pinned memory, from which a GPU copies without waiting.
        pin_memory=torch.cuda.is_available(),
    )
    return _raised(iter(loader))
