"""What happens to a step whose loss or gradients are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.step import StepOutput
from lightning_megatron.errors import ConfigError, NonFiniteError
from lightning_megatron.rank_zero import rank_zero_warn


@dataclass(frozen=True, kw_only=True)
class FiniteCheck:
    """Whether a step's gradients are finite: warns of a step without targets, and raises or warns if they are not."""

    output: StepOutput
    """Result of ``Schedule.train``."""
    objective: str
    """Class of the objective."""
    step: int
    """Number of the step."""
    max_skips: int
    """How many steps in a row may be skipped before the run ends; 0 if the first one ends it."""
    skips_in_a_row: int
    """How many have been skipped since the last update."""
    dp_rank: int
    group: dist.ProcessGroup
    """All ranks, over gloo."""
    check_weights: Callable[[], None]
    """Raises if weights are not finite, which no other batch can mend; called on all ranks if the norm is not."""

    def __call__(self, grad_norm: float) -> None:
        """Check the step; every rank must call, with the same norm.

        Args:
            grad_norm: Norm of the step's gradients; NaN or infinite if the loss is.

        Raises:
            NonFiniteError: If ``grad_norm`` is not finite, unless the step may be skipped.
            ConfigError: If the gradients were divided by other target counts than ``loss_func`` returned.
        """
        output = self.output
        if grad_norm == 0 and not sum(output.num_targets.values()):
            rank_zero_warn(
                "a global batch had no targets (all labels are -100); check labels and loss masks"
            )
        if math.isfinite(grad_norm):
            return
        total = sum(output.terms.values())
        if output.experts is not None:
            total = total + output.experts.loss
        if not math.isfinite(output.loss) and math.isfinite(total):
            raise ConfigError(
                f"{self.objective}.counts: expected the numbers of targets that loss_func returns, got "
                "others; override both, or let counts return None"
            )
        self.check_weights()
        problem = f"step {self.step}: {self._origin()}"
        if self.max_skips == 0:
            raise NonFiniteError(
                f"{problem}; expected finite numbers. The weights are as before the step: look at that batch and the "
                'learning rate, or leave such steps out with MegatronStrategy(on_nan="skip")'
            )
        if self.skips_in_a_row >= self.max_skips:
            raise NonFiniteError(
                f"{problem}, after {self.skips_in_a_row} skipped steps in a row; expected at most "
                f"max_skips_in_a_row={self.max_skips}. The weights are as before these steps: look at their "
                "batches and the learning rate"
            )
        rank_zero_warn(f"{problem}; the step is skipped")

    def _origin(self) -> str:
        """Describe where the step became non-finite; every rank of the group must call."""
        mine = (self.dp_rank, self.output.microbatch_losses.tolist())
        of_ranks = gather_objects(mine, self.group)
        for rank, (dp_rank, losses) in enumerate(of_ranks):
            for number, loss in enumerate(losses):
                if not math.isfinite(loss):
                    place = f"rank {rank} (data-parallel rank {dp_rank})"
                    return f"the loss of microbatch {number} on {place} is {loss}"
        return "a gradient is NaN or infinite (the loss is not) on an unknown rank"
