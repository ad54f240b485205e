"""How does a user's batch become one step of the engine? Prepared, filled up to whole microbatches, and scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.schedule import Schedule, StepOutput
from lightning_megatron.engine.wrap import connect_schedule
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.engine.optimizer import MegatronOptimizer
    from lightning_megatron.engine.schedule import Observer
    from lightning_megatron.steps.base import Batch, TrainStep


class Stepper:
    """Runs training and evaluation steps on this rank's model chunks, with whatever objective each call brings."""

    def __init__(self, chunks: list[Any], topology: Topology) -> None:
        """Take the (wrapped) chunks and this rank's place; to train, before the optimizer is made."""
        self._chunks = chunks
        self._topology = topology
        self._schedule: Schedule | None = None
        self._train_step: TrainStep | None = None
        self._train_rows: int | None = None
        self._weights = [(n, p, p.requires_grad) for chunk in chunks for n, p in chunk.named_parameters()]

    def train(
        self, batch: Batch, train_step: TrainStep, optimizer: MegatronOptimizer, micro_batch_size: int | None = None
    ) -> StepOutput:
        """Replace the gradients by those of ``batch``. Every rank must call.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            optimizer: What the gradients are for.
            micro_batch_size: Rows of a microbatch where their number changes from step to step (batch-size ramp-up);
                None for the layout's number of microbatches.

        Raises:
            ConfigError: If the rows of a full batch cannot be cut into equal microbatches.
        """
        self.check_frozen()
        schedule = self._schedule_for(train_step)
        connect_schedule(self._chunks, schedule.finalize_gradients, optimizer.scale_loss)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        optimizer.clear_gradients()
        prepared = train_step.prepare_batch(batch)
        rows = _num_rows(prepared)
        if micro_batch_size is not None:
            return schedule.run(prepared, rows // micro_batch_size, forward_only=False)
        if self._train_rows is None:
            self._train_rows = rows
        if rows == self._train_rows:
            self._check_divisible(rows)
        return schedule.run(self._filled_up(prepared, train_step), self._num_microbatches, forward_only=False)

    def check_frozen(self) -> None:
        """Raise if weights of this rank were frozen or unfrozen after their optimizer was made.

        Raises:
            ConfigError: Because of the first of them.
        """
        for name, weight, is_trained in self._weights:
            if weight.requires_grad != is_trained:
                raise ConfigError(
                    f"{name}: expected requires_grad={is_trained} as when the optimizer was made, got "
                    f"{weight.requires_grad}; freeze and unfreeze before fit, in setup or in configure_model"
                )

    def evaluate(self, batch: Batch, train_step: TrainStep, observe: Observer | None = None) -> StepOutput:
        """The losses of ``batch``, whatever its number of rows. Every rank must call.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            observe: Called on the last stage with each microbatch and what the model returned for it.
        """
        prepared = self._filled_up(train_step.prepare_batch(batch), train_step)
        schedule = self._schedule_for(train_step)
        return schedule.run(prepared, self._num_microbatches, forward_only=True, observe=observe)

    @property
    def _num_microbatches(self) -> int:
        return self._topology.parallel.num_microbatches

    def _schedule_for(self, train_step: TrainStep) -> Schedule:
        if self._schedule is None or self._train_step is not train_step:
            self._schedule = Schedule(self._chunks, train_step, self._topology)
            self._train_step = train_step
        return self._schedule

    def _check_divisible(self, rows: int) -> None:
        num_microbatches = self._num_microbatches
        if rows % num_microbatches != 0:
            raise ConfigError(
                f"a batch of {rows} rows cannot be cut into num_microbatches={num_microbatches} equal parts; use a "
                f"batch_size that is a multiple of {num_microbatches} (micro_batch_size x num_microbatches)"
            )

    def _filled_up(self, batch: Batch, train_step: TrainStep) -> Batch:
        """The batch with rows that carry no loss added until ``num_microbatches`` divides them."""
        num_microbatches = self._num_microbatches
        rows = _num_rows(batch)
        whole = -(-rows // num_microbatches) * num_microbatches
        return batch if rows == whole else train_step.pad_rows(batch, whole)


def _num_rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
