"""Which samples does a data-parallel rank take at a step, and where does an interrupted run go on? Pure arithmetic.

A position is a count of samples over all ranks, so it means the same at any tp, pp, dp or batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.serving.batch_shape import BatchShape
from lightning_megatron.errors import CheckpointError, DataError

PADDING_ROW = -1
"""Stands for a row without a sample in the last batch of an evaluation."""

Shuffling: TypeAlias = Literal["later passes", "every pass", "never"]
"""When samples are put in another order: their own may be shuffled already, or be the one that the user wants."""


class PassOrder:
    """The order in which each pass over ``num_samples`` samples takes them; the same on every rank and in every run."""

    def __init__(self, num_samples: int, seed: int, shuffling: Shuffling) -> None:
        """Nothing is drawn before a pass needs it."""
        self.num_samples = num_samples
        self.seed = seed
        self._shuffling = shuffling
        self._drawn: dict[int, NDArray[np.int64]] = {}

    def entry(self, number: int, place: int) -> int:
        """The sample that stands at ``place`` of pass ``number``, both from 0."""
        if self._shuffling == "never" or (self._shuffling == "later passes" and number == 0):
            return place
        if number not in self._drawn:
            # A batch may lie across two passes.
            self._drawn = {kept: order for kept, order in self._drawn.items() if kept == number - 1}
            self._drawn[number] = np.random.default_rng((self.seed, number)).permutation(self.num_samples)
        return int(self._drawn[number][place])


class TrainSampler:
    """Deals the samples of a training run, and remembers how far it came.

    Two ways, by ``max_steps``:

    * a number: the run is one long epoch of that many steps. Where the samples end, the next pass over them begins
      within the same batch. Lightning epochs do not matter;
    * None: each Lightning epoch is one pass; an incomplete global batch at its end is dropped.

    The position counts batches that were handed out (``advance``), not those that workers fetched ahead.
    """

    def __init__(self, *, order: PassOrder, shape: BatchShape, max_steps: int | None) -> None:
        """Begin at the first sample.

        Args:
            order: Of the samples.
            shape: How a step is dealt.
            max_steps: Steps of the run, or None for whole epochs.

        Raises:
            DataError: If whole epochs are asked for and one has not enough samples for a step.
        """
        self.order = order
        """May be replaced between two batches by another one in which the position means the same samples."""
        self._shape = shape
        self._max_steps = max_steps
        self.epoch = 0
        """Current epoch; stays 0 with ``max_steps``."""
        self.consumed_samples = 0
        """Samples handed out since the epoch began, over all data-parallel ranks."""
        self.steps = 0
        """Steps handed out since the epoch began, over all runs that led here."""
        self._earlier_samples = 0
        """Samples handed out in the epochs before; a ramp-up counts those of the whole run."""
        if max_steps is None:
            check_epoch(order.num_samples, shape)

    def __len__(self) -> int:
        """Steps of the whole epoch, those already taken included: Lightning counts them as done when it resumes."""
        return self.steps + self._remaining_steps()

    def batches(self) -> Iterator[list[int]]:
        """Samples of this rank for each step from the position on; does not move it."""
        first = self.consumed_samples
        for _ in range(self._remaining_steps()):
            shape = self._shape.at(self._earlier_samples + first)
            yield [self._entry(position) for position in shape.positions(first)]
            first += shape.global_batch_size

    def advance(self) -> None:
        """Count one step as handed out."""
        self.steps += 1
        self.consumed_samples += self._shape.at(self._earlier_samples + self.consumed_samples).global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        if self._max_steps is None and epoch != self.epoch:
            self._earlier_samples += self.consumed_samples
            self.epoch, self.consumed_samples, self.steps = epoch, 0, 0

    def next_epoch_is_as_long(self) -> bool:
        """Whether it has as many steps; not behind a resume with another batch size, nor while the batch grows."""
        if self._max_steps is not None:
            return True
        begin = self._shape.position_after(self._earlier_samples + self.consumed_samples, self._remaining_steps())
        return self._shape.steps_in(begin, begin + self.order.num_samples) == len(self)

    def state_dict(self) -> dict[str, int]:
        """The position; the same on every rank."""
        position = {"epoch": self.epoch, "consumed_samples": self.consumed_samples, "steps": self.steps}
        return {**position, "earlier_samples": self._earlier_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, of a run with any layout.

        Raises:
            CheckpointError: If ``state`` is not one of ``state_dict``.
        """
        names = ("epoch", "consumed_samples", "steps", "earlier_samples")
        state = {"earlier_samples": 0, **state}  # older checkpoints do not say
        values = [state.get(name) for name in names]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise CheckpointError(
                f"position of the training data {state} needs whole numbers {', '.join(names)}: the checkpoint was"
                " written with another data module; resume with that one"
            )
        self.epoch, self.consumed_samples, self.steps, self._earlier_samples = (int(state[name]) for name in names)
        if self._max_steps is not None and self.epoch > 0:
            # The run counted epochs: each was a pass, of which this one goes on.
            self.consumed_samples += self.epoch * self.order.num_samples
            self.epoch = self._earlier_samples = 0

    def _entry(self, position: int) -> int:
        if self._max_steps is None:
            return self.order.entry(self.epoch, position)
        return self.order.entry(*divmod(position, self.order.num_samples))

    def _remaining_steps(self) -> int:
        if self._max_steps is not None:
            return max(0, self._max_steps - self.steps)
        first, end = self.consumed_samples, self.order.num_samples
        return self._shape.steps_in(self._earlier_samples + first, self._earlier_samples + end)


def check_epoch(num_samples: int, shape: BatchShape) -> None:
    """See to it that one pass over ``num_samples`` training samples is at least one step.

    Raises:
        DataError: If it is not.
    """
    step = shape.at(0)
    if num_samples < step.global_batch_size:
        raise DataError(
            f"one epoch of the training split has {num_samples} samples, one step takes {step.global_batch_size}"
            f" (micro_batch_size={step.micro_batch_size} x num_microbatches={step.num_microbatches} x data-parallel"
            f" size {step.data_parallel_size}); lower one of them, add documents, or set trainer.max_steps without"
            " max_epochs to repeat the corpus"
        )


def evaluation_batches(num_samples: int, shape: BatchShape) -> Iterator[list[int]]:
    """This rank's samples for each step of one pass over a split; ``PADDING_ROW`` where it has no more samples.

    Every rank gets as many steps of the same shape, whatever the remainder.
    """
    for first in range(0, num_samples, shape.global_batch_size):
        yield [p if p < num_samples else PADDING_ROW for p in shape.positions(first)]


def num_evaluation_steps(num_samples: int, shape: BatchShape) -> int:
    """Steps that ``evaluation_batches`` gives."""
    return -(-num_samples // shape.global_batch_size)
