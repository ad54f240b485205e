"""Global batch of an optimizer step, its ramp-up, and each data-parallel rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from lightning_megatron.errors import ConfigError


@dataclass(frozen=True)
class BatchRampup:
    """Ramp-up of the global batch from ``start`` in equal increments over the first ``samples`` samples.

    Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """Global batch of the first step."""
    increment: int
    """Rows added at each increase."""
    samples: int
    """Samples after which the global batch has its full size."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Global batch of an optimizer step, and this data-parallel rank's share of it."""

    micro_batch_size: int
    """Rows of one microbatch of one data-parallel rank."""
    num_microbatches: int
    """Microbatches per step; with a ramp-up, of a full-size step."""
    data_parallel_size: int
    """Number of data-parallel ranks."""
    data_parallel_rank: int
    """This data-parallel rank."""
    rampup: BatchRampup | None = None
    """Ramp-up of training steps to this size."""

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all data-parallel ranks."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @cached_property
    def stages(self) -> list[int]:
        """Microbatches of one data-parallel rank at each stage of the ramp-up, ascending.

        Raises:
            ConfigError: If the batch of a stage cannot be split into equal microbatches on all ranks.
        """
        if self.rampup is None:
            return [self.num_microbatches]
        ramp = self.rampup
        full = self.global_batch_size
        unit = self.micro_batch_size * self.data_parallel_size
        grows = ramp.start >= 1 and ramp.increment >= 1 and ramp.samples >= 1 and ramp.start < full
        if (
            not grows
            or (full - ramp.start) % ramp.increment
            or ramp.start % unit
            or ramp.increment % unit
        ):
            raise ConfigError(
                f"rampup_batch_size=[{ramp.start}, {ramp.increment}, {ramp.samples}]: expected a first global batch and"
                f" an increment, multiples of micro_batch_size={self.micro_batch_size} x dp={self.data_parallel_size},"
                f" which reach the global batch of {full} in whole increments, and a positive number of samples"
            )
        return [
            rows // unit
            for rows in range(
                ramp.start,
                full + 1,
                ramp.increment,
            )
        ]

    def at(self, consumed_samples: int) -> Self:
        """Shape of the training step that begins at this position, by the rule of Megatron's ramp-up."""
        ramp = self.rampup
        stages = self.stages
        if ramp is None:
            return self
        is_full = consumed_samples > ramp.samples
        stage = -1 if is_full else int(consumed_samples / (ramp.samples / (len(stages) - 1)))
        return replace(self, num_microbatches=stages[stage], rampup=None)

    def positions(self, first: int) -> list[int]:
        """This rank's positions in the step that begins at position ``first``, in row order.

        Megatron's order: each microbatch over all ranks is consecutive, and each rank has a consecutive part of it
        (Megatron-LM core_r0.16, legacy/data/data_samplers.py:MegatronPretrainingSampler).
        """
        rows = self.micro_batch_size
        first = first + self.micro_batch_size * self.data_parallel_rank
        microbatches = range(first, first + self.global_batch_size, rows * self.data_parallel_size)
        return [begin + row for begin in microbatches for row in range(rows)]

    def steps_in(self, first: int, end: int) -> int:
        """Complete training steps between the positions ``first`` and ``end``."""
        steps = 0
        while self.rampup is not None and first <= self.rampup.samples:
            first += self.at(first).global_batch_size
            if first > end:
                return steps
            steps += 1
        return steps + max(0, end - first) // self.global_batch_size

    def position_after(self, first: int, steps: int) -> int:
        """Position after ``steps`` training steps from ``first``."""
        while self.rampup is not None and steps > 0 and first <= self.rampup.samples:
            first = first + self.at(first).global_batch_size
            steps = steps - 1
        return first + max(0, steps) * self.global_batch_size
