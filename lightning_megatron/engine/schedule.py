"""Run a batch through the pipeline as microbatches, with one exact loss over the global batch.

``TrainStep`` is the contract of a training objective. It sees one data-parallel rank's batch once per optimizer step
(``prepare_batch``) and each microbatch of it once (``get_batch``, ``forward_step``, ``loss_func``), inside Megatron's
pipeline schedule. None of its methods may log or communicate: they run many times per step, and the loss only on the
last pipeline stage.

The loss of a step is a sum over targets divided by their number in the *global* batch. The number is known before the
forward pass where the train step can tell it (one small all-reduce over dp), so each microbatch's gradient comes out
right at once; otherwise the gradients are divided after the backward pass. Either way any split into microbatches and
any dp give the same numbers, for uneven masks too.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from lightning_megatron.engine.fillers.experts import LoadBalance, LoadReport
from lightning_megatron.engine.fillers.fp8 import fp8_linears, quantized_weights
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.engine.microbatch_graph import MicrobatchGraphs
from lightning_megatron.engine.wrap import reduce_shared_gradients, unwrap
from lightning_megatron.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from torchmetrics import Metric

    from lightning_megatron.engine.optimizer import MegatronOptimizer
    from lightning_megatron.models.config import ModelConfig

# ---- the contract of an objective ------------------------------------------------------------------------------------

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


# ---- the schedule ----------------------------------------------------------------------------------------------------

Observer: TypeAlias = Callable[[Batch, Output], None]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """How many tokens one optimizer step works on."""

    micro_batch_size: int
    """Rows of one microbatch."""
    num_microbatches: int
    """Microbatches of one data-parallel rank."""
    seq_length: int
    """Tokens per row."""
    data_parallel_size: int
    """Data-parallel ranks."""
    lengths: tuple[int, ...] = ()
    """Tokens per row of each sequence if there are several: of T5's encoder and decoder."""
    expert_counts: torch.Tensor | None = field(default=None, compare=False)
    """[layers, experts], fp32, the same on every rank: how many tokens of a step of training went to each."""

    @property
    def global_batch_size(self) -> int:
        """Rows over all ranks."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @property
    def tokens(self) -> int:
        """Tokens over all ranks, padding included."""
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The losses of one step; the same values on every rank, on the device (reading one waits for the GPU)."""

    loss: torch.Tensor
    """[], fp32: the sum of the terms."""
    terms: Mapping[str, torch.Tensor]
    """[], fp32 each: the mean of each term over the targets of the global batch."""
    num_targets: Mapping[str, torch.Tensor]
    """[], fp32 each: how many targets that was."""
    shape: StepShape
    microbatch_losses: torch.Tensor
    """[num_microbatches], fp32: what each adds to the sum on this rank; empty before the last stage."""
    experts: LoadReport | None = None
    """Of a step of training with experts, whose auxiliary loss is part of ``loss`` and no term; None otherwise."""

    @property
    def expert_metrics(self) -> dict[str, torch.Tensor]:
        """What is logged of experts, [] each, on the device; nothing without."""
        if (load := self.experts) is None:
            return {}
        loads = {"expert_load_max": load.max_load, "expert_load_min": load.min_load}
        return {"load_balancing_loss": load.loss, **loads}


class Schedule:
    """Runs batches through this rank's model chunks; every rank must call with its part of the same batch."""

    _step: TrainStep
    _observe: Observer | None

    def __init__(self, chunks: list[Any], topology: Topology, graphs: MicrobatchGraphs | None = None) -> None:
        """Take the (wrapped) chunks and this rank's place; to train, before the optimizer is made.

        Args:
            chunks: Of this rank.
            topology: The layout.
            graphs: Where training replays microbatches; on one stage, without tensor parallelism.
        """
        self._chunks = chunks
        self._topology = topology
        self._num_microbatches = topology.parallel.num_microbatches
        # Each chunk has its own reference to the config, and Megatron's schedule reads the first one's.
        self._configs = [unwrap(chunk).config for chunk in chunks]
        self._sequence_divisor = topology.parallel.sequence_divisor
        self._fp8_linears = fp8_linears(chunks)
        self._train_rows: int | None = None
        self._weights = [(n, p, p.requires_grad) for chunk in chunks for n, p in chunk.named_parameters()]
        self._denominators: dict[str, torch.Tensor] | None = None
        self._counted: dict[tuple[str, ...], torch.Tensor] = {}
        self._targets_seen: list[torch.Tensor] = []
        self._graphs = graphs
        has_experts = self._configs[0].num_moe_experts is not None
        self._balance = LoadBalance(self._configs[0], chunks) if has_experts else None

    def train(
        self, batch: Batch, train_step: TrainStep, optimizer: MegatronOptimizer, micro_batch_size: int | None = None
    ) -> StepOutput:
        """Replace the gradients by those of ``batch``.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            optimizer: What the gradients are for.
            micro_batch_size: Rows of a microbatch where their number changes from step to step (batch-size ramp-up);
                None for the layout's number of microbatches.

        Raises:
            ConfigError: If the rows of a full batch cannot be cut into equal microbatches, or the objective has several
                terms but cannot count their targets in advance.
        """
        self.check_frozen()
        self._connect(optimizer)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        optimizer.inner.zero_grad()
        self._step, self._observe = train_step, None
        prepared = train_step.prepare_batch(batch)
        rows = _num_rows(prepared)
        if micro_batch_size is not None:
            return self._run(prepared, rows // micro_batch_size, forward_only=False)
        self._train_rows = self._train_rows or rows
        # The last batch of an epoch may be smaller.
        if rows == self._train_rows and rows % self._num_microbatches != 0:
            raise ConfigError(f"a batch of {rows} rows cannot be cut into num_microbatches={self._num_microbatches}")
        return self._run(self._filled_up(prepared), self._num_microbatches, forward_only=False)

    def evaluate(self, batch: Batch, train_step: TrainStep, observe: Observer | None = None) -> StepOutput:
        """The losses of ``batch``, whatever its number of rows.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            observe: Called on the last stage with each microbatch and what the model returned for it.
        """
        self._step, self._observe = train_step, observe
        prepared = self._filled_up(train_step.prepare_batch(batch))
        return self._run(prepared, self._num_microbatches, forward_only=True)

    def check_frozen(self) -> None:
        """Raise if weights of this rank were frozen or unfrozen after their optimizer was made.

        Raises:
            ConfigError: Because of the first of them.
        """
        for name, weight, is_trained in self._weights:
            if weight.requires_grad != is_trained:
                raise ConfigError(
                    f"{name}: expected requires_grad={is_trained} as when the optimizer was made; freeze before fit"
                )

    def check_finite(
        self, output: StepOutput, grad_norm: float, *, step: int, may_skip: bool, group: dist.ProcessGroup
    ) -> None:
        """Warn of a step without targets; say who has made its loss or gradients NaN or infinite.

        Every rank must call, with the same ``grad_norm``.

        Args:
            output: Of ``train``.
            grad_norm: Of its gradients; NaN or infinite if the loss is.
            step: Its number.
            may_skip: Whether training goes on without it.
            group: All ranks, on the hosts.

        Raises:
            NonFiniteError: If ``grad_norm`` is not finite, unless the step may be skipped.
            ConfigError: If the gradients were divided by other numbers of targets than the loss has.
        """
        if grad_norm == 0 and not sum(output.num_targets.values()):
            rank_zero_warn("a whole batch had no label to learn from (all are -100); look at labels and loss masks")
        if math.isfinite(grad_norm):
            return
        aside = 0.0 if output.experts is None else output.experts.loss
        if not math.isfinite(output.loss) and math.isfinite(sum(output.terms.values()) + aside):
            raise ConfigError(
                f"{type(self._step).__name__}.counts: expected the numbers of targets that loss_func returns, got "
                "others; override both, or let counts return None"
            )
        what = f"step {step}: {self._culprit(output.microbatch_losses, group)}"
        if not may_skip:
            raise NonFiniteError(
                f"{what}; expected finite numbers. The weights are as before the step: look at that batch and the "
                'learning rate, or leave such steps out with MegatronStrategy(on_nan="skip")'
            )
        rank_zero_warn(f"{what}; the step is skipped")

    def _culprit(self, losses: torch.Tensor, group: dist.ProcessGroup) -> str:
        """Where a step's loss was not finite; every rank of ``group`` must call with its microbatches' losses."""
        dp_rank = self._topology.dp_rank
        mine = [(loss, number, dp_rank) for number, loss in enumerate(losses.tolist())]
        of_ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine, group=group)
        for rank, found in enumerate(of_ranks):
            for loss, number, row in found:
                if not math.isfinite(loss):
                    return f"the loss of microbatch {number} on rank {rank} (data-parallel row {row}) is {loss}"
        return "a gradient is NaN or infinite (the loss is not) on a rank or data-parallel row that cannot be told"

    def _connect(self, optimizer: MegatronOptimizer) -> None:
        """Give every chunk's config the functions that Megatron's schedule calls around a step."""
        no_sync = [chunk.no_sync for chunk in self._chunks]
        for chunk, config in zip(self._chunks, self._configs, strict=True):
            config.finalize_model_grads_func = self._finalize_gradients
            config.grad_scale_func = optimizer.inner.scale_loss
            if chunk.ddp_config.overlap_grad_reduce:
                config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _filled_up(self, batch: Batch) -> Batch:
        """The batch with rows that carry no loss added until ``num_microbatches`` divides them."""
        rows = _num_rows(batch)
        whole = -(-rows // self._num_microbatches) * self._num_microbatches
        return batch if rows == whole else self._step.pad_rows(batch, whole)

    def _run(self, batch: Batch, num_microbatches: int, *, forward_only: bool) -> StepOutput:
        """Forward (and backward) over the whole local batch, whose rows are a multiple of ``num_microbatches``."""
        parallel = self._topology.parallel
        lengths = self._step.split_lengths(batch)
        for name, length in lengths.items():
            if length % self._sequence_divisor:
                parallel.check_sequence(length, name=name)
        shape = StepShape(
            micro_batch_size=_num_rows(batch) // num_microbatches,
            num_microbatches=num_microbatches,
            seq_length=self._step.seq_length(batch),
            data_parallel_size=self._topology.dp,
            lengths=tuple(lengths.values()) if len(lengths) > 1 else (),
        )
        balance = None if forward_only else self._balance
        self._denominators = None if forward_only else self._global_counts(batch, balance)
        self._targets_seen = []
        rows_of = (tensor.chunk(num_microbatches) for tensor in batch.values())
        microbatches = [dict(zip(batch, rows, strict=True)) for rows in zip(*rows_of, strict=True)]
        device = next(iter(batch.values())).device
        if not forward_only and (reports := self._replayed(microbatches)) is not None:
            return self._reduce(reports, shape, device)
        iterators = [iter(microbatches) for _ in self._chunks]
        with contextlib.ExitStack() as around:
            if self._fp8_linears:
                around.enter_context(quantized_weights(self._fp8_linears))
            if self._graphs is not None:
                around.enter_context(self._graphs.on_stream())
            reports = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators if parallel.vpp else iterators[0],
                model=self._chunks if parallel.vpp else self._chunks[0],
                num_microbatches=num_microbatches,
                seq_length=shape.seq_length,
                micro_batch_size=shape.micro_batch_size,
                forward_only=forward_only,
            )
        output = self._reduce(reports, shape, device)
        if balance is None:
            return output
        report = balance.end(device)
        shape = replace(shape, expert_counts=report.counts)
        return replace(output, loss=output.loss + report.loss, experts=report, shape=shape)

    def _replayed(self, microbatches: list[Batch]) -> list[torch.Tensor] | None:
        """Reports of the microbatches, whose gradients CUDA graphs have added up; None if Megatron shall run them."""
        if self._graphs is None or self._denominators is None or not self._graphs.is_ready(microbatches[0]):
            return None
        (chunk,), (config,) = self._chunks, self._configs

        def body(held: Batch) -> torch.Tensor:
            output, report = self._forward_step(iter([held]), chunk)
            numbers: torch.Tensor
            loss, _, numbers = report(output)
            config.grad_scale_func(loss).backward()
            return numbers

        reports = [self._graphs.run(each, body) for each in microbatches]
        self._finalize_gradients(self._chunks)
        return reports

    def _global_counts(self, batch: Batch, balance: LoadBalance | None) -> dict[str, torch.Tensor] | None:
        """Targets of each term in the global batch: one all-reduce over the dp group; and its tokens, for experts."""
        counts, names = self._step.counts(batch), self._step.loss_terms
        if counts is None:
            if len(names) > 1 or balance is not None:
                terms = f"loss terms {', '.join(names)}{' and that of the load of experts' if balance else ''}"
                raise ConfigError(
                    f"{type(self._step).__name__} has the {terms} but cannot count targets; implement counts()"
                )
            return None
        packed = [counts[name].float() for name in names]
        if balance is not None:
            mask = batch.get("attention_mask")
            tokens = _num_rows(batch) * self._step.seq_length(batch)
            packed.append(packed[0].new_full((), tokens) if mask is None else (mask != 0).sum().float())
        totals = torch.stack(packed)
        dist.all_reduce(totals, group=self._topology.dp_group)
        if balance is not None:
            balance.begin(totals[-1])
        # A batch without a target has the loss 0, not 0/0. Recorded graphs read them where those of other steps were.
        counted = totals[: len(names)].clamp(min=1.0)
        held = self._counted.setdefault(tuple(names), counted).copy_(counted)
        return dict(zip(names, held.unbind(), strict=True))

    def _forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Output, Any]:
        microbatch = next(data_iterator)
        progress.ticks += 1
        output, loss_func = self._step.forward_step(iter([microbatch]), model)

        def report(output: Output) -> tuple[torch.Tensor, int, torch.Tensor]:
            if self._observe is not None:
                self._observe(microbatch, output)
            return self._scaled_loss(loss_func, output)

        return output, report

    def _scaled_loss(self, loss_func: LossFunc, output: Output) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Megatron's 3-tuple (loss, token count, report); the count is ours to keep, so the engine gets 0."""
        terms = loss_func(output)
        ordered = [terms[name] for name in self._step.loss_terms]
        report = torch.stack([torch.stack([term.sum.detach().float(), term.targets.float()]) for term in ordered])
        if self._denominators is None:
            self._targets_seen += [term.targets.detach().float() for term in ordered]
            return torch.stack([term.sum for term in ordered]).sum(), 0, report
        loss = torch.stack([terms[name].sum / n for name, n in self._denominators.items()]).sum()
        return loss, 0, report

    def _reduce(self, reports: list[torch.Tensor], shape: StepShape, device: torch.device) -> StepOutput:
        """[sum, count] of each term: added over microbatches and dp, sent from the last stage to all."""
        names = self._step.loss_terms
        total = torch.zeros(len(names), 2, device=device)
        of_microbatches = torch.stack(reports) if self._topology.is_last_stage else total[:0, None]
        if self._topology.is_last_stage:
            total = of_microbatches.sum(0)
            dist.all_reduce(total, group=self._topology.dp_group)
        if self._topology.parallel.pp > 1:
            dist.broadcast(total, self._topology.last_stage, group=self._topology.pp_group)
        counted = total[:, 1].clamp(min=1.0)
        means = total[:, 0] / counted
        loss = means.sum()
        if self._denominators is not None:  # which gradients were divided by; the host learns of it with their norm
            told = torch.stack([*self._denominators.values()])
            loss = loss.masked_fill(~torch.isclose(counted, told, rtol=1e-3).all(), math.nan)
        return StepOutput(
            loss=loss,
            terms=dict(zip(names, means.unbind(), strict=True)),
            num_targets=dict(zip(names, total[:, 1].unbind(), strict=True)),
            shape=shape,
            microbatch_losses=of_microbatches[..., 0].sum(1),
        )

    def _finalize_gradients(
        self,
        chunks: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Megatron's ``finalize_model_grads_func``: reduce all gradients, then divide by the targets if still owed.

        megatron-core 0.16.1, distributed/finalize_model_grads.py divides behind ``if num_tokens > 0``, which makes the
        host wait for the GPU; here the division stays on the device, and only happens when the count was not known.
        """
        finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        reduce_shared_gradients(chunks, self._topology.pp_group)
        if self._denominators is not None:
            return
        topology = self._topology
        device = next(chunks[0].parameters()).device
        count = torch.stack(self._targets_seen).sum() if self._targets_seen else torch.zeros((), device=device)
        if topology.parallel.pp > 1:
            dist.broadcast(count, topology.last_stage, group=topology.pp_group)
        dist.all_reduce(count, group=topology.dp_group)
        for chunk in chunks:
            chunk.scale_gradients(1.0 / count.clamp(min=1.0))


def _num_rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
