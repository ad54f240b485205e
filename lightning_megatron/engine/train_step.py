"""The contract of a training objective, ``TrainStep``: from a batch to the losses of its microbatches.

A step sees one data-parallel rank's batch once per optimizer step (``prepare_batch``) and each microbatch of it once
(``get_batch``, ``forward_step``, ``loss_func``), inside Megatron's pipeline schedule. None of its methods may log or
communicate: they run many times per step, and the loss only on the last pipeline stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from torchmetrics import Metric

    from lightning_megatron.models.config import ModelConfig

Batch: TypeAlias = dict[str, torch.Tensor]


class LossTerm(NamedTuple):
    """A loss before its division: the engine sums both over the global batch and divides once, exactly."""

    sum: torch.Tensor
    """[], fp32: the sum over the targets of one microbatch; gradients flow through it."""
    targets: torch.Tensor
    """[]: how many targets the sum is over."""


Output: TypeAlias = Any
"""What the last stage's model returns: a tensor, or what the architecture's ``forward`` says."""

LossFunc: TypeAlias = Callable[[Output], dict[str, LossTerm]]


class TrainStep(ABC):
    """From a batch to a loss. Subclass it, or subclass ``GPTTrainStep`` and override the one method that differs.

    Attributes:
        loss_terms: Names of the terms that ``loss_func`` returns; the training loss is the sum of their means.
        model: The description of the model that is trained, from ``bind`` on.
    """

    loss_terms: ClassVar[tuple[str, ...]]

    def bind(self, model: ModelConfig) -> None:
        """Learn which model is to be trained; called once, before anything else, when a module takes the step.

        Raises:
            ConfigError: If this objective cannot train that model.
        """
        self.model = model

    def check_batch(self, batch: Batch) -> None:
        """Look at the numbers of a batch while it is still on the host, on the one rank that reads data.

        What it raises is raised on every rank that shares this copy of the model. A step whose batches never leave
        their range need not look.

        Args:
            batch: As the DataLoader yields it, on the CPU; what says nothing, like a mask that hides nothing, may be
                taken out.

        Raises:
            DataError: If a token or a label is out of range, with its name, value and the rule.
        """
        del batch

    @abstractmethod
    def prepare_batch(self, batch: Batch) -> Batch:
        """The user's batch in this step's own form, on every rank, once per optimizer step.

        Args:
            batch: Tensors of one data-parallel rank, first axis ``micro_batch_size * num_microbatches`` rows.

        Returns:
            Tensors with the same number of rows; they are cut into microbatches along the first axis.
        """

    @abstractmethod
    def pad_rows(self, batch: Batch, num_rows: int) -> Batch:
        """A prepared batch grown to ``num_rows`` rows whose additional ones carry no loss (for ragged last batches)."""

    @abstractmethod
    def seq_length(self, batch: Batch) -> int:
        """Tokens per row of a prepared batch: the length of what pipeline stages send to each other."""

    def split_lengths(self, batch: Batch) -> Mapping[str, int]:
        """Every length that sequence parallelism must be able to split, by what an error calls it; usually one."""
        return {"seq_length": self.seq_length(batch)}

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor] | None:
        """How many targets each term has in a prepared batch, if that is known before the forward pass.

        Must equal the sum of the counts that ``loss_func`` returns for its microbatches. Steps with several terms must
        know; a step with one term may return None, which costs one more pass over the gradients.
        """
        return None

    def get_batch(self, data_iterator: Iterator[Batch]) -> Batch:
        """The next microbatch."""
        return next(data_iterator)

    @abstractmethod
    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, LossFunc]:
        """One forward pass of one microbatch through this rank's model chunk.

        Args:
            data_iterator: Yields the prepared microbatches in order.
            model: The chunk; on stages before the last its output is the hidden state that goes on, [s, b, h].

        Returns:
            The output, and the function that the last stage calls with it.
        """

    @abstractmethod
    def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
        """The loss terms of one microbatch, on the last stage.

        Args:
            batch: The microbatch that ``output`` was computed from.
            output: What the last stage's model returned.
        """

    def metrics(self) -> dict[str, Metric]:
        """New metrics of validation and test, by the name that follows ``val_`` and ``test_`` in the log.

        They are updated on the last stage only, and synchronized over the data-parallel ranks of it when an epoch ends.
        """
        return {}

    def update_metrics(self, metrics: Mapping[str, Metric], batch: Batch, output: Output) -> None:
        """Take one microbatch of an evaluation into ``metrics``, on the last stage; rows without loss must not count.

        Args:
            metrics: What ``metrics()`` returned.
            batch: The prepared microbatch.
            output: What the last stage's model returned.
        """
        del metrics, batch, output
