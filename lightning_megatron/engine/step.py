"""Sizes and losses of one step, as the schedule returns them to the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_megatron.engine.ops.router import LoadReport


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Sizes of the global batch of one optimizer step."""

    micro_batch_size: int
    """Rows of one microbatch."""
    num_microbatches: int
    """Microbatches of one data-parallel rank."""
    seq_length: int
    """Tokens per sequence."""
    data_parallel_size: int
    """Data-parallel ranks."""
    sequences_per_row: int = 1
    """Sequences that the model reads for each row."""
    lengths: tuple[int, ...] = ()
    """Tokens per row of each sequence if there are several (T5's encoder and decoder), otherwise empty."""
    expert_counts: Tensor | None = field(default=None, compare=False)
    """[layers, experts], fp32, the same on every rank: tokens routed to each expert in a training step."""

    @property
    def global_batch_size(self) -> int:
        """Rows of the global batch."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @property
    def tokens(self) -> int:
        """Tokens of the global batch, padding included."""
        return self.global_batch_size * self.sequences_per_row * self.seq_length


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The losses of one step; the same values on every rank, on the device (reading one waits for the GPU)."""

    loss: Tensor
    """[], fp32: the sum of the terms."""
    terms: Mapping[str, Tensor]
    """[], fp32 each: the mean of each term over the targets of the global batch."""
    num_targets: Mapping[str, Tensor]
    """[], fp32 each: the number of these targets."""
    logged: Mapping[str, Tensor] = field(default_factory=dict)
    """[], fp32 each: means of values that are logged beside the terms, and are not part of the loss."""
    shape: StepShape
    microbatch_losses: Tensor
    """[num_microbatches], fp32: summed losses of each microbatch of this rank; empty before the last stage."""
    experts: LoadReport | None = None
    """Load of a training step's experts, whose auxiliary loss is part of ``loss`` but not a term; None otherwise."""

    @property
    def expert_metrics(self) -> dict[str, Tensor]:
        """Metrics of experts to log, [] each, on the device; empty without experts."""
        if self.experts is None:
            return {}
        return {
            "load_balancing_loss": self.experts.loss,
            "expert_load_max": self.experts.max_load,
            "expert_load_min": self.experts.min_load,
        }
