"""How many rows does a step take, and which of them does a rank read? Pure arithmetic, batch-size ramp-up included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from lightning_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchRampup:
    """A global batch that grows from ``start`` in equal steps while the first ``samples`` samples are consumed.

    Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """Rows of all ranks in the first step."""
    increment: int
    """Rows by which it grows each time."""
    samples: int
    """Samples after which it has its full size."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """From what a user gives as ``rampup_batch_size``.

        Raises:
            ConfigError: If these are not three numbers.
        """
        if len(numbers) != 3:
            raise ConfigError(
                f"rampup_batch_size={list(numbers)} must be three numbers: the first global batch, the increment, and"
                " the samples until the batch has its full size"
            )
        start, increment, samples = numbers
        return cls(start=start, increment=increment, samples=samples)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How one optimizer step's samples are dealt to ranks."""

    micro_batch_size: int
    """Rows of one microbatch of one data-parallel rank."""
    num_microbatches: int
    """Microbatches of one step; with a ramp-up, of a step of full size."""
    data_parallel_size: int
    """Data-parallel ranks."""
    data_parallel_rank: int
    """This one."""
    rampup: BatchRampup | None = None
    """How training steps grow to this size."""

    @property
    def rows(self) -> int:
        """Rows of this rank's batch for one step."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def global_batch_size(self) -> int:
        """Rows of all ranks in one step."""
        return self.rows * self.data_parallel_size

    def at(self, consumed_samples: int) -> Self:
        """The shape of the training step that begins at this position."""
        if self.rampup is None:
            return self
        num_microbatches = _num_microbatches(replace(self, data_parallel_rank=0), consumed_samples)
        return replace(self, num_microbatches=num_microbatches, rampup=None)

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

    def steps_in(self, first: int, end: int) -> int:
        """Whole training steps between the positions ``first`` and ``end``."""
        steps = 0
        while self.rampup is not None and first <= self.rampup.samples:
            first += self.at(first).global_batch_size
            if first > end:
                return steps
            steps += 1
        return steps + max(0, end - first) // self.global_batch_size

    def position_after(self, first: int, steps: int) -> int:
        """The position that ``steps`` training steps reach from ``first``."""
        while self.rampup is not None and steps > 0 and first <= self.rampup.samples:
            first, steps = first + self.at(first).global_batch_size, steps - 1
        return first + max(0, steps) * self.global_batch_size

    def stages(self) -> list[int]:
        """Microbatches of one data-parallel rank at each stage of the ramp-up, ascending.

        Raises:
            ConfigError: If a stage cannot be dealt to the ranks in equal microbatches.
        """
        if self.rampup is None:
            return [self.num_microbatches]
        ramp, full, unit = self.rampup, self.global_batch_size, self.micro_batch_size * self.data_parallel_size
        given = f"rampup_batch_size=[{ramp.start}, {ramp.increment}, {ramp.samples}]"
        if ramp.start < 1 or ramp.increment < 1 or ramp.samples < 1:
            raise ConfigError(f"{given} needs three positive numbers: first global batch, increment, samples")
        if ramp.start >= full or (full - ramp.start) % ramp.increment != 0:
            raise ConfigError(
                f"{given} must reach the global batch of {full} (micro_batch_size={self.micro_batch_size} x"
                f" num_microbatches={self.num_microbatches} x data-parallel size {self.data_parallel_size}) from a"
                f" smaller one in whole increments; choose a start and an increment that differ from {full} by that"
            )
        for rows in range(ramp.start, full + 1, ramp.increment):
            if rows % unit != 0:
                raise ConfigError(
                    f"{given} comes to a global batch of {rows}, which is no multiple of {unit}"
                    f" (micro_batch_size={self.micro_batch_size} x data-parallel size {self.data_parallel_size});"
                    f" choose multiples of {unit} for start and increment"
                )
        return [rows // unit for rows in range(ramp.start, full + 1, ramp.increment)]


@lru_cache(maxsize=16)
def _num_microbatches(shape: BatchShape, consumed_samples: int) -> int:
    """Megatron's own calculator, asked anew for each position: it then knows nothing of earlier ones."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    assert shape.rampup is not None
    calculator = RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size=shape.global_batch_size,
        micro_batch_size=shape.micro_batch_size,
        data_parallel_size=shape.data_parallel_size,
        decrease_batch_size_if_needed=False,
        rank=1,  # silent
        start_global_batch_size=shape.rampup.start,
        batch_size_increment=shape.rampup.increment,
        ramup_samples=shape.rampup.samples,
    )
    calculator.update(consumed_samples, consistency_check=False)
    return int(calculator.get())
