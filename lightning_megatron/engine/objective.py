"""A training objective as the schedule calls it: batches, loss terms, and the functions from one to the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = dict[str, Tensor]


class LossTerm(NamedTuple):
    """Unnormalized loss: the engine sums both fields over the global batch and divides once, exactly."""

    sum: Tensor
    """[], fp32: sum of the losses of a microbatch's targets; gradients flow through it."""
    targets: Tensor
    """[]: number of these targets."""


Output: TypeAlias = Any
"""Output of the last stage's model: a tensor, or what the architecture's ``forward`` returns."""

LossFunc: TypeAlias = Callable[[Output], dict[str, LossTerm]]


@dataclass(frozen=True, kw_only=True)
class FrozenPass:
    """A forward pass of a frozen model through the pipeline, before the forward and backward passes of a step.

    It runs without gradients and in evaluation mode. What its last stage computes becomes part of the microbatches
    there.
    """

    forward: Callable[[Batch, torch.nn.Module], Output]
    """Runs a microbatch through a model chunk, whose output before the last stage is the hidden state for the next."""
    results: Callable[[Batch, Output], Batch]
    """Tensors to add to a microbatch, by key, from the output of the last stage."""
    chunks: Sequence[torch.nn.Module] | None = None
    """This rank's chunks of the frozen model, as many as of the trained one; None for the trained one itself."""
    context: (
        Callable[[Sequence[torch.nn.Module]], contextlib.AbstractContextManager[None]] | None
    ) = None
    """Changes the chunks for the pass; None for no change."""


class Objective(Protocol):
    """What the schedule needs of a training objective; ``steps.base.TrainStep``, which users subclass, documents it."""

    loss_terms: ClassVar[tuple[str, ...]]
    logged_terms: ClassVar[tuple[str, ...]]
    sequences_per_row: ClassVar[int]

    def prepare_batch(self, batch: Batch) -> Batch:
        """Convert a batch of the DataLoader to the form of this objective, once per optimizer step."""

    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """Pad a prepared batch to ``num_rows`` rows with rows without loss."""

    def seq_length(self, batch: Batch) -> int:
        """Tokens per row of a prepared batch."""

    def split_lengths(self, batch: Batch) -> Mapping[str, int]:
        """Sequence lengths that context and sequence parallelism split, by their name in errors."""

    def counts(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Number of targets of each loss term in a prepared batch; None if unknown before the forward pass."""

    def frozen_pass(self, batch: Batch) -> FrozenPass | None:
        """The pass of a frozen model that a prepared batch needs before the step; None for none."""

    def forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, LossFunc]:
        """Run the forward pass of a microbatch through a model chunk of this rank."""
