"""Loaders of this package's data modules, which resume at the exact sample, at any layout.

A position counts samples over all data-parallel ranks, so it means the same at any tp, pp, dp or batch size. The
loaders are not subclasses of ``torch.utils.data.DataLoader``, so Lightning does not replace their sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.batch_shape import BatchShape
from lightning_megatron.data.samples import Rows, Samples
from lightning_megatron.data.workers import parallel_map
from lightning_megatron.errors import DataError

PADDING_ROW = -1
"""Index of a row without a sample, in the last batch of an evaluation."""
Shuffling: TypeAlias = Literal["later passes", "every pass", "never"]
"""Which passes are shuffled: the samples' own order may be shuffled already, or be the one that the user wants."""


@dataclass(frozen=True)
class PassOrder:
    """Order of the samples in each pass over them; the same on every rank and in every run."""

    num_samples: int
    seed: int
    shuffling: Shuffling
    fingerprint: str = ""
    """Fingerprint of the samples."""
    requested: int | None = None
    """Samples requested for the whole run, where these are indexed at once; None for one pass."""

    def sample_at(self, pass_index: int, position: int) -> int:
        """Index of the sample at ``position`` of pass ``pass_index``, both from 0."""
        if self.shuffling == "never" or (self.shuffling == "later passes" and pass_index == 0):
            return position
        return int(_permutation(self.num_samples, self.seed, pass_index)[position])


@lru_cache(maxsize=2)  # a batch may span two passes
def _permutation(
    num_samples: int,
    seed: int,
    pass_index: int,
) -> NDArray[np.int64]:
    return np.random.default_rng((seed, pass_index)).permutation(num_samples)


@dataclass
class Position:
    """Progress of a run in its training samples: integers that are the same on every rank and at any layout."""

    epoch: int = 0
    """Current epoch; stays 0 with ``max_steps``."""
    consumed_samples: int = 0
    """Samples yielded since the epoch began, over all data-parallel ranks."""
    steps: int = 0
    """Steps yielded since the epoch began, including those before a resume."""
    earlier_samples: int = 0
    """Samples yielded in earlier epochs; a ramp-up counts those of the whole run."""


class TrainLoader:
    """Resumable loader of training batches; its position counts batches yielded, not those prefetched by workers.

    Two modes, by ``max_steps``:

    * a number: the run is one long epoch of that many steps. Where the samples end, the next pass over them begins
      within the same batch. Lightning epochs do not matter;
    * None: each Lightning epoch is one pass; an incomplete global batch at its end is dropped.
    """

    def __init__(
        self,
        samples: Samples | None,
        order: PassOrder,
        shape: BatchShape,
        max_steps: int | None,
        num_workers: int,
    ) -> None:
        """Start at the first sample.

        Args:
            samples: Open samples; None on a rank that receives its batches from another one.
            order: Order of the samples.
            shape: Global batch of a step, and this rank's share.
            max_steps: Steps of the run, or None for epochs of one pass each.
            num_workers: Worker processes that prefetch.

        Raises:
            DataError: If ``max_steps`` is None and one pass has too few samples for a step.
        """
        self.samples = samples
        self.order = order
        """May be replaced before the first batch, by those of a resumed run."""
        self.sampler = self
        """Lightning calls ``sampler.set_epoch`` on every loader."""
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is requested: those yielded before have been trained on."""
        self.position = Position()
        self.state_dict: Callable[[], dict[str, Any]] = dict
        """``state_dict`` of the data module, which Lightning saves for the loader too."""
        self._shape = shape
        self._max_steps = max_steps
        self._num_workers = num_workers
        step = shape.at(0)
        if max_steps is None and order.num_samples < step.global_batch_size:
            raise DataError(
                f"one epoch of the training split has {order.num_samples} samples, one step takes micro_batch_size="
                f"{step.micro_batch_size} x num_microbatches={step.num_microbatches} x dp={step.data_parallel_size};"
                " lower one of them, add documents, or set trainer.max_steps without max_epochs to repeat the corpus"
            )

    def __len__(self) -> int:
        """Steps of the whole epoch, including those already taken: Lightning counts these as done when it resumes."""
        return self.position.steps + self._remaining_steps()

    def __iter__(self) -> Iterator[Rows]:
        """Yield batches from the position at the first ``next``: Lightning may restore it after making the iterator."""
        # Random numbers that samples draw differ between epochs and replicas, and after a resume.
        position = self.position
        seed = (
            self.order.seed,
            position.epoch,
            position.consumed_samples,
            self._shape.data_parallel_rank,
        )
        self.before_batch()
        for batch in _load_batches(
            self.samples,
            self.batches(),
            self._num_workers,
            seed,
        ):
            # Counted before it is yielded, so that a checkpoint written during the step includes it.
            self.advance()
            yield batch
            self.before_batch()

    def batches(self) -> Iterator[list[int]]:
        """Sample indices of this rank for each step from the position on, which does not advance."""
        position = self.position
        first = self.position.consumed_samples
        epoch = position.epoch
        earlier = position.earlier_samples
        for _ in range(self._remaining_steps()):
            shape = self._shape.at(earlier + first)
            offsets = (divmod(index, self.order.num_samples) for index in shape.positions(first))
            yield [self.order.sample_at(epoch + passes, offset) for passes, offset in offsets]
            first += shape.global_batch_size

    def advance(self) -> None:
        """Count one step as yielded."""
        position = self.position
        shape = self._shape.at(position.earlier_samples + position.consumed_samples)
        position.steps += 1
        position.consumed_samples += shape.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        position = self.position
        if self._max_steps is None and epoch != position.epoch:
            self.position = Position(
                epoch=epoch, earlier_samples=position.earlier_samples + position.consumed_samples
            )

    def next_epoch_has_same_length(self) -> bool:
        """Whether the next epoch has as many steps: not after a resume with another batch size, or in a ramp-up."""
        if self._max_steps is not None:
            return True
        begin = self.position.earlier_samples + self.position.consumed_samples
        begin = self._shape.position_after(begin, self._remaining_steps())
        return self._shape.steps_in(begin, begin + self.order.num_samples) == len(self)

    def seek(self, position: Mapping[str, int]) -> None:
        """Continue from the ``Position`` of a run at any layout, as a dict; older ones lack ``earlier_samples``."""
        old = Position(**position)
        if self._max_steps is not None and old.epoch > 0:
            # That run counted epochs of one pass each: continue within its last one.
            old = Position(
                consumed_samples=old.consumed_samples + old.epoch * self.order.num_samples,
                steps=old.steps,
            )
        self.position = old

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: Lightning has restored the data module before, and restores the loader only in some cases.

        (lightning 2.6.6, loops/fit_loop.py:setup_data, which asks whether the run is in mid-epoch.)
        """

    def _remaining_steps(self) -> int:
        if self._max_steps is not None:
            return max(0, self._max_steps - self.position.steps)
        position = self.position
        earlier = self.position.earlier_samples
        return self._shape.steps_in(
            earlier + position.consumed_samples, earlier + self.order.num_samples
        )


class PassLoader:
    """Loader of one pass over a split, for validation, test and prediction.

    Every rank yields the same number of batches of the same shape, whatever the remainder. They have a ``sample_mask``
    [rows] float32 too: 0 for the rows that pad the last batch.
    """

    def __init__(
        self, samples: Samples | None, num_samples: int, shape: BatchShape, num_workers: int
    ) -> None:
        """Keep the arguments.

        Args:
            samples: Open samples; None on a rank that receives its batches from another one.
            num_samples: Number of samples of the split, also on ranks without ``samples``.
            shape: Global batch of a step, and this rank's share.
            num_workers: Worker processes that prefetch.
        """
        self._samples = samples
        self._num_samples = num_samples
        self._shape = shape
        self._num_workers = num_workers

    def __len__(self) -> int:
        return -(-self._num_samples // self._shape.global_batch_size)

    def batch_indices(self) -> Iterator[list[int]]:
        """Sample indices of each batch of this replica; the last one is padded with ``PADDING_ROW``."""
        for first in range(0, self._num_samples, self._shape.global_batch_size):
            positions = self._shape.positions(first)
            yield [index if index < self._num_samples else PADDING_ROW for index in positions]

    def __iter__(self) -> Iterator[Rows]:
        seed = (self._shape.data_parallel_rank,)
        # Padding rows repeat the first sample, with weight 0.
        padded = ([max(0, index) for index in batch] for batch in self.batch_indices())
        batches = _load_batches(self._samples, padded, self._num_workers, seed)
        for indices, rows in zip(self.batch_indices(), batches, strict=True):
            mask = torch.tensor([float(index != PADDING_ROW) for index in indices])
            yield {**rows, "sample_mask": rows.get("sample_mask", 1) * mask}


def _load_batches(
    samples: Samples | None,
    batches: Iterator[list[int]],
    num_workers: int,
    seed: tuple[int, ...],
) -> Iterator[Rows]:
    if samples is None:
        # A placeholder for the source rank's batch; its rows tell Lightning the batch size.
        yield from (
            {"rows": torch.empty((len(indices), 0), dtype=torch.int64)} for indices in batches
        )
        return
    # A private generator: the DataLoader draws a seed for its workers, which must not advance the random state that
    # dropout uses: on this rank alone, and at another step after a resume.
    private = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    options = {"num_workers": num_workers, "generator": private}
    yield from parallel_map(samples.rows, batches, options)
