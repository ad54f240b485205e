"""Which samples does a data-parallel rank take at a step, and where does an interrupted run go on? Pure arithmetic.

A position is a count of samples over all ranks, so it means the same at any tp, pp, dp or batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import CheckpointError, DataError

PADDING_ROW = -1
"""Stands for a row without a sample in the last batch of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How one optimizer step's samples are dealt to ranks."""

    micro_batch_size: int
    """Rows of one microbatch of one data-parallel rank."""
    num_microbatches: int
    """Microbatches of one step."""
    data_parallel_size: int
    """Data-parallel ranks."""
    data_parallel_rank: int
    """This one."""

    @property
    def rows(self) -> int:
        """Rows of this rank's batch for one step."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def global_batch_size(self) -> int:
        """Rows of all ranks in one step."""
        return self.rows * self.data_parallel_size

    def positions(self, first: int) -> list[int]:
        """This rank's positions in the step that begins at position ``first``, in row order.

        Megatron's order: a microbatch of all ranks is consecutive, and each rank has a consecutive part of it
        (Megatron-LM core_r0.16, legacy/data/data_samplers.py:MegatronPretrainingSampler).
        """
        stride = self.micro_batch_size * self.data_parallel_size
        begin = first + self.micro_batch_size * self.data_parallel_rank
        return [
            begin + microbatch * stride + row
            for microbatch in range(self.num_microbatches)
            for row in range(self.micro_batch_size)
        ]


class TrainSampler:
    """Deals the samples of a training run, and remembers how far it came.

    Two ways, by ``max_steps``:

    * a number: the run is one long epoch of that many steps over an index that was built for it. Where one pass over
      the corpus ends the index goes on with the next, reshuffled. Lightning epochs do not matter;
    * None: each Lightning epoch is one pass over the index; incomplete global batches at its end are dropped. Epoch 0
      takes the index in its own shuffled order, each later epoch in a permutation of its own.

    The position counts batches that were handed out (``advance``), not those that workers fetched ahead.
    """

    def __init__(self, *, num_indexed: int, shape: BatchShape, seed: int, max_steps: int | None) -> None:
        """Begin at the first sample.

        Args:
            num_indexed: Samples in the index.
            shape: How a step is dealt.
            seed: Of the permutations of later epochs.
            max_steps: Steps of the run, or None for whole epochs.

        Raises:
            DataError: If whole epochs are asked for and one has not enough samples for a step.
        """
        self._num_indexed = num_indexed
        self._shape = shape
        self._seed = seed
        self._max_steps = max_steps
        self.epoch = 0
        """Current epoch; stays 0 with ``max_steps``."""
        self.consumed_samples = 0
        """Samples handed out since the epoch began, over all data-parallel ranks."""
        self.steps = 0
        """Steps handed out since the epoch began, over all runs that led here."""
        if max_steps is None and num_indexed < shape.global_batch_size:
            raise DataError(
                f"one epoch of the training split has {num_indexed} samples, one step takes"
                f" {shape.global_batch_size} (micro_batch_size={shape.micro_batch_size} x"
                f" num_microbatches={shape.num_microbatches} x data-parallel size {shape.data_parallel_size});"
                " lower one of them, add documents, or set trainer.max_steps without max_epochs to repeat the corpus"
            )

    def __len__(self) -> int:
        """Steps of the whole epoch, those already taken included: Lightning counts them as done when it resumes."""
        return self.steps + self._remaining_steps()

    def batches(self) -> Iterator[list[int]]:
        """Index entries of this rank for each step from the position on; does not move it."""
        first, order = self.consumed_samples, self._order()
        for _ in range(self._remaining_steps()):
            positions = self._shape.positions(first)
            # After a change of the batch size a run may need more samples than its index was built for: wrap around.
            yield [int(order[p]) if order is not None else p % self._num_indexed for p in positions]
            first += self._shape.global_batch_size

    def advance(self) -> None:
        """Count one step as handed out."""
        self.steps += 1
        self.consumed_samples += self._shape.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        if self._max_steps is None and epoch != self.epoch:
            self.epoch, self.consumed_samples, self.steps = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The position; the same on every rank."""
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, of a run with any layout.

        Raises:
            CheckpointError: If ``state`` is not one of ``state_dict``.
        """
        names = ("epoch", "consumed_samples", "steps")
        values = [state.get(name) for name in names]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise CheckpointError(
                f"position of the training data {state} needs whole numbers {', '.join(names)}: the checkpoint was"
                " written with another data module; resume with that one"
            )
        self.epoch, self.consumed_samples, self.steps = (int(state[name]) for name in names)

    def _remaining_steps(self) -> int:
        if self._max_steps is not None:
            return max(0, self._max_steps - self.steps)
        return max(0, self._num_indexed - self.consumed_samples) // self._shape.global_batch_size

    def _order(self) -> NDArray[np.int64] | None:
        if self._max_steps is not None or self.epoch == 0:
            return None
        return np.random.default_rng((self._seed, self.epoch)).permutation(self._num_indexed)


def evaluation_batches(num_samples: int, shape: BatchShape) -> Iterator[list[int]]:
    """This rank's index entries for each step of one pass over a split; ``PADDING_ROW`` where it has no more samples.

    Every rank gets as many steps of the same shape, whatever the remainder.
    """
    for first in range(0, num_samples, shape.global_batch_size):
        yield [p if p < num_samples else PADDING_ROW for p in shape.positions(first)]


def num_evaluation_steps(num_samples: int, shape: BatchShape) -> int:
    """Steps that ``evaluation_batches`` gives."""
    return -(-num_samples // shape.global_batch_size)
