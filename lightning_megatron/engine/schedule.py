"""Forward and backward passes of a batch as microbatches through the pipeline, with one exact loss per global batch.

The loss of a step is a sum over targets divided by their number in the *global* batch. If the objective can count its
targets before the forward pass (one small all-reduce over dp), each microbatch's gradient is already divided correctly;
otherwise the gradients are divided after the backward pass. Either way loss and gradients do not depend on the split
into microbatches or on dp, for uneven masks too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.utils import parametrize

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.microbatch_graph import MicrobatchGraphs
from lightning_megatron.engine.objective import (
    Batch,
    FrozenPass,
    LossFunc,
    LossTerm,
    Objective,
    Output,
)
from lightning_megatron.engine.ops.fp8 import fp8_linears, quantized_weights
from lightning_megatron.engine.ops.gathered_dispatch import equal_rows
from lightning_megatron.engine.ops.router import LoadBalance
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.penalties import keep_gradients, last_node, weights_read
from lightning_megatron.engine.progress import progress
from lightning_megatron.engine.shared_weights import reduce_shared_gradients
from lightning_megatron.engine.step import StepOutput, StepShape
from lightning_megatron.engine.weight_names import global_name
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError, divisors

Observer: TypeAlias = Callable[[Batch, Output], None]


class Schedule:
    """Runs batches through this rank's model chunks; every rank must call with its shard of the same global batch."""

    _step: Objective
    _observe: Observer | None

    def __init__(
        self,
        chunks: list[Any],
        topology: Topology,
        graphs: MicrobatchGraphs | None = None,
    ) -> None:
        """Set up the schedule of (wrapped) chunks; for training, before the optimizer is built.

        Args:
            chunks: This rank's model chunks.
            topology: The layout, and this rank's coordinates in it.
            graphs: CUDA graphs for training; only with one pipeline stage and without tensor parallelism.
        """
        self._chunks = chunks
        self._topology = topology
        self._num_microbatches = topology.parallel.num_microbatches
        # Each chunk has its own reference to a config, and Megatron's schedule reads the first chunk's.
        self._configs = [unwrap(chunk).config for chunk in chunks]
        self._sequence_divisor = topology.parallel.sequence_divisor
        self._fp8_linears = fp8_linears(chunks)
        self._train_rows: int | None = None
        self._weights = [
            (global_name(name, model), weight, weight.requires_grad, weight.data_ptr())
            for model in map(unwrap, chunks)
            for name, weight in model.named_parameters()
        ]
        self._denominators: dict[str, Tensor] | None = None
        self._denominator_buffers: dict[tuple[str, ...], Tensor] = {}
        self._targets_seen: list[Tensor] = []
        self._graphs = graphs
        self._balance: LoadBalance | None = None
        if self._configs[0].num_moe_experts is not None:
            self._balance = LoadBalance(self._configs[0], chunks)

    def train(
        self,
        batch: Batch,
        train_step: Objective,
        optimizer: MegatronOptimizer,
        micro_batch_size: int | None = None,
    ) -> StepOutput:
        """Compute the gradients of ``batch``, replacing the previous ones.

        Args:
            batch: Batch of the DataLoader.
            train_step: The objective.
            optimizer: The optimizer of the gradients.
            micro_batch_size: Rows of a microbatch if the number of microbatches changes between steps (batch-size
                ramp-up); None for the layout's number of microbatches.

        Raises:
            ConfigError: If the rows of a full batch cannot be split into equal microbatches, or the objective has
                several terms but cannot count their targets in advance.
        """
        self.check_weights()
        self._set_engine_hooks(optimizer)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        optimizer.inner.zero_grad()
        self._step = train_step
        self._observe = None
        prepared = train_step.prepare_batch(batch)
        rows = _num_rows(prepared)
        num_microbatches = self._num_microbatches
        if micro_batch_size is not None:
            num_microbatches = rows // micro_batch_size
        else:
            if self._train_rows is None:
                self._train_rows = rows
            # The last batch of an epoch may be smaller.
            if rows == self._train_rows and rows % num_microbatches != 0:
                raise ConfigError(_uneven_batch(rows, num_microbatches))
            prepared = self._padded(prepared)
        output = self._run(prepared, num_microbatches, forward_only=False)
        self._check_hooks_of_users()
        return output

    def evaluate(
        self,
        batch: Batch,
        train_step: Objective,
        observe: Observer | None = None,
    ) -> StepOutput:
        """Compute the losses of ``batch``, with any number of rows.

        Args:
            batch: Batch of the DataLoader.
            train_step: The objective.
            observe: Called on the last stage with each microbatch and the model's output for it.
        """
        self._step = train_step
        self._observe = observe
        prepared = self._padded(train_step.prepare_batch(batch))
        return self._run(prepared, self._num_microbatches, forward_only=True)

    def check_start(self) -> None:
        """Raise if this rank's model cannot be trained as it is, before the first step.

        Raises:
            ConfigError: If torch computes weights of layers from other tensors, or as ``check_weights``.
        """
        for chunk in self._chunks:
            _check_are_weights(chunk)
        self.check_weights()

    def check_weights(self) -> None:
        """Raise if weights of this rank were frozen, unfrozen or given other memory after the optimizer was built.

        Called in each step, so it is kept short.

        Raises:
            ConfigError: If so; it names the first such weight.
        """
        for name, weight, is_trained, address in self._weights:
            if weight.requires_grad != is_trained:
                raise ConfigError(
                    f"{name}: expected requires_grad={is_trained} as when the optimizer was made; freeze before fit"
                )
            if is_trained and weight.data_ptr() != address:
                raise ConfigError(
                    f"{name}: expected the memory that the optimizer updates, got another tensor as its data; change "
                    "it in place: with torch.no_grad(): parameter.copy_(...)"
                )

    def _check_hooks_of_users(self) -> None:
        """Raise if a hook on a weight was called without the gradient, before the first update.

        Raises:
            ConfigError: If so; it names the first such weight.
        """
        for name, weight, *_ in self._weights:
            has_hook = weight._backward_hooks or weight._post_accumulate_grad_hooks
            if not has_hook:
                continue
            reason = None
            if getattr(weight, "grad_added_to_main_grad", False):
                reason = "its layer adds the gradient to a buffer, and the hook gets a placeholder"
            elif self._graphs is not None:
                reason = "replays of CUDA graphs do not call it"
            if reason is not None:
                raise ConfigError(
                    f"{name}: expected no hook on this weight, got one, but {reason}; change main_grad in "
                    "on_before_optimizer_step, or freeze the weight"
                )

    def _set_engine_hooks(self, optimizer: MegatronOptimizer) -> None:
        """Set the functions in every chunk's config that Megatron's schedule calls around a step."""
        no_sync = [chunk.no_sync for chunk in self._chunks]
        for chunk, config in zip(self._chunks, self._configs, strict=True):
            config.finalize_model_grads_func = self._finalize_gradients
            config.grad_scale_func = optimizer.inner.scale_loss
            if chunk.ddp_config.overlap_grad_reduce:
                config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def _padded(self, batch: Batch) -> Batch:
        """Pad the batch with rows without loss to a multiple of ``num_microbatches``."""
        rows = _num_rows(batch)
        num_rows = -(-rows // self._num_microbatches) * self._num_microbatches
        if rows == num_rows:
            return batch
        return self._step.pad_rows(batch, num_rows)

    def _run(
        self,
        batch: Batch,
        num_microbatches: int,
        *,
        forward_only: bool,
    ) -> StepOutput:
        """Run forward (and backward) over the local batch, whose rows are a multiple of ``num_microbatches``."""
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
            sequences_per_row=self._step.sequences_per_row,
            lengths=tuple(lengths.values()) if len(lengths) > 1 else (),
        )
        balance = None if forward_only else self._balance
        self._targets_seen = []
        self._denominators = None
        if not forward_only:
            self._denominators = self._global_counts(batch, balance)
        microbatches = _split_rows(batch, num_microbatches)
        frozen = self._step.frozen_pass(batch)
        if frozen is not None:
            self._run_frozen(frozen, microbatches, shape)
        device = next(iter(batch.values())).device
        if not forward_only and self._can_replay(microbatches[0]):
            return self._reduce(self._replay(microbatches), shape, device)
        reports = self._pipeline(
            self._chunks,
            self._forward_step,
            microbatches,
            shape,
            forward_only=forward_only,
        )
        output = self._reduce(reports, shape, device)
        if balance is None:
            return output
        load = balance.end(device)
        return replace(
            output,
            loss=output.loss + load.loss,
            experts=load,
            shape=replace(shape, expert_counts=load.counts),
        )

    def _run_frozen(
        self,
        frozen: FrozenPass,
        microbatches: list[Batch],
        shape: StepShape,
    ) -> None:
        """Run the microbatches through a frozen model, and add its results to them on the last stage.

        Raises:
            ConfigError: With CUDA graphs, which replay the trained model alone.
        """
        if self._graphs is not None:
            raise ConfigError(
                f"cuda_graphs=True: expected a train step without a frozen model, got {type(self._step).__name__} with "
                "one; leave cuda_graphs out"
            )
        chunks = self._chunks
        if frozen.chunks is not None:
            chunks = list(frozen.chunks)

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> Any:
            microbatch = next(data_iterator)
            progress.tick()
            output = frozen.forward(microbatch, model)

            def add_results(output: Output) -> tuple[Tensor, int, Tensor]:
                results = frozen.results(microbatch, output)
                microbatch.update(results)
                nothing = next(iter(results.values())).new_zeros(())
                return nothing, 0, nothing

            return output, add_results

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_evaluated(chunks))
            if frozen.context is not None:
                stack.enter_context(frozen.context(chunks))
            self._pipeline(chunks, forward_step, microbatches, shape, forward_only=True)

    def _pipeline(
        self,
        chunks: list[Any],
        forward_step: Callable[..., Any],
        microbatches: list[Batch],
        shape: StepShape,
        *,
        forward_only: bool,
    ) -> list[Tensor]:
        """Run the microbatches through chunks in Megatron's schedule and return their reports."""
        is_interleaved = self._topology.parallel.vpp is not None
        iterators = [iter(microbatches) for _ in chunks]
        linears = self._fp8_linears
        if chunks is not self._chunks:
            linears = fp8_linears(chunks)
        sequences = shape.micro_batch_size * shape.sequences_per_row
        with contextlib.ExitStack() as stack:
            config = chunks[0].config
            if config.num_moe_experts is not None:
                tokens = sequences * shape.seq_length
                stack.enter_context(equal_rows(config, chunks, tokens, self._topology.host_group))
            if linears:
                stack.enter_context(quantized_weights(linears))
            if self._graphs is not None:
                stack.enter_context(self._graphs.on_stream())
            reports: list[Tensor] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if is_interleaved else iterators[0],
                model=chunks if is_interleaved else chunks[0],
                num_microbatches=shape.num_microbatches,
                seq_length=shape.seq_length,
                micro_batch_size=sequences,
                forward_only=forward_only,
            )
        return reports

    def _can_replay(self, microbatch: Batch) -> bool:
        """Whether a batch's microbatches run as CUDA graphs, not through Megatron's schedule."""
        if self._graphs is None or self._denominators is None:
            return False
        return self._graphs.is_ready(microbatch)

    def _replay(self, microbatches: list[Batch]) -> list[Tensor]:
        """Run the microbatches as CUDA graphs and return their reports."""
        graphs = self._graphs
        assert graphs is not None
        (chunk,) = self._chunks
        (config,) = self._configs

        def body(microbatch: Batch) -> Tensor:
            output, report = self._forward_step(iter([microbatch]), chunk)
            values: Tensor
            loss, _, values = report(output)
            config.grad_scale_func(loss).backward()
            return values

        reports = [graphs.run(microbatch, body) for microbatch in microbatches]
        self._finalize_gradients(self._chunks)
        return reports

    def _global_counts(self, batch: Batch, balance: LoadBalance | None) -> dict[str, Tensor] | None:
        """All-reduce over dp the targets of each term (1 for none) and, with experts, the tokens they balance.

        Returns:
            The targets by term; None if they are unknown.

        Raises:
            ConfigError: If they are unknown but needed.
        """
        names = self._step.loss_terms
        counts = self._step.counts(batch)
        if counts is None:
            if len(names) > 1 or balance is not None:
                terms = f"loss terms {', '.join(names)}"
                if balance is not None:
                    terms += " and that of the load of experts"
                raise ConfigError(
                    f"{type(self._step).__name__} has the {terms} but cannot count targets; implement counts()"
                )
            return None
        packed = [counts[name].float() for name in names]
        if balance is not None:
            packed.append(self._count_tokens(batch, packed[0]))
        totals = torch.stack(packed)
        dist.all_reduce(totals, group=self._topology.dp_group)
        if balance is not None:
            balance.begin(totals[-1])
        # Captured graphs read the counts at the same address in each step.
        totals = _divisors(totals[: len(names)])
        buffer = self._denominator_buffers.setdefault(tuple(names), totals).copy_(totals)
        return dict(zip(names, buffer.unbind(), strict=True))

    def _count_tokens(self, batch: Batch, like: Tensor) -> Tensor:
        """Tokens of the local batch without padding: [], fp32, on the device of ``like``."""
        mask = batch.get("attention_mask")
        if mask is not None:
            return (mask != 0).sum().float()
        sequences = _num_rows(batch) * self._step.sequences_per_row
        return like.new_full((), sequences * self._step.seq_length(batch))

    def _forward_step(
        self,
        data_iterator: Iterator[Batch],
        model: torch.nn.Module,
    ) -> tuple[Output, Any]:
        microbatch = next(data_iterator)
        progress.tick()
        output, loss_func = self._step.forward_step(iter([microbatch]), model)

        def report(output: Output) -> tuple[Tensor, int, Tensor]:
            if self._observe is not None:
                self._observe(microbatch, output)
            return self._scaled_loss(loss_func, output)

        return output, report

    def _scaled_loss(
        self,
        loss_func: LossFunc,
        output: Output,
    ) -> tuple[Tensor, int, Tensor]:
        """Megatron's 3-tuple (loss, token count, report); the count is 0, because this class counts targets itself."""
        last_of_model = last_node(output)
        terms = loss_func(output)
        self._keep_penalties(terms, last_of_model)
        reports = []
        losses = []
        for name in self._step.loss_terms:
            loss, targets = terms[name]
            reports.append(_report(terms[name]))
            if self._denominators is None:
                self._targets_seen.append(targets.detach().float())
            else:
                loss = loss / self._denominators[name]
            losses.append(loss)
        reports += [_report(terms[name]) for name in self._step.logged_terms]
        return torch.stack(losses).sum(), 0, torch.stack(reports)

    def _keep_penalties(self, terms: Mapping[str, LossTerm], last_of_model: int) -> None:
        """Keep the gradients of weights that terms read by themselves.

        Raises:
            ConfigError: If this layout gives such terms another meaning than one rank.
        """
        losses = [terms[name].sum for name in self._step.loss_terms]
        reads = weights_read(losses, last_of_model)
        penalized = next((each.weight for each in reads if each.is_penalized), None)
        if penalized is not None:
            self._check_penalty(penalized)
        keep_gradients(each.weight for each in reads)

    def _check_penalty(self, weight: Tensor) -> None:
        parallel = self._topology.parallel
        name = next((name for name, each, *_ in self._weights if each is weight), "a weight")
        penalty = f"{type(self._step).__name__}.loss_func: its terms read {name} itself"
        instead = "use weight_decay or multipliers of the optimizer"
        sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "cp", "ep")}
        split = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        if split:
            raise ConfigError(
                f"{penalty}: expected a layout in which each rank holds the whole model, got {split}; {instead}"
            )
        recomputes = self._configs[0].recompute_granularity is not None
        if recomputes and self._chunks[0].ddp_config.overlap_grad_reduce:
            raise ConfigError(
                f"{penalty}, and its gradient would be reduced before that of the recomputed layer: expected no "
                f"recompute or overlap_communication=False, got both; {instead}"
            )

    def _reduce(
        self,
        reports: list[Tensor],
        shape: StepShape,
        device: torch.device,
    ) -> StepOutput:
        """Sum each term's [sum, count] over microbatches and dp, and broadcast them from the last stage."""
        losses = len(self._step.loss_terms)
        names = self._step.loss_terms + self._step.logged_terms
        topology = self._topology
        total = torch.zeros(len(names), 2, device=device)
        per_microbatch = total[:0, None]
        if topology.is_last_stage:
            per_microbatch = torch.stack(reports)
            total = per_microbatch.sum(0)
            dist.all_reduce(total, group=topology.dp_group)
        if topology.parallel.pp > 1:
            dist.broadcast(total, topology.last_stage, group=topology.pp_group)
        sums, targets = total.unbind(1)
        counts = _divisors(targets)
        means = sums / counts
        loss = means[:losses].sum()
        if self._denominators is not None:
            # The gradients' own counts: a mismatch makes the loss, and so the norm, NaN.
            expected = torch.stack([*self._denominators.values()])
            agree = torch.isclose(counts[:losses], expected, rtol=1e-3).all()
            loss = loss.masked_fill(~agree, math.nan)
        values = dict(zip(names, means.unbind(), strict=True))
        return StepOutput(
            loss=loss,
            terms={name: values[name] for name in self._step.loss_terms},
            num_targets=dict(zip(names, targets.unbind(), strict=True)),
            logged={name: values[name] for name in self._step.logged_terms},
            shape=shape,
            microbatch_losses=per_microbatch[:, :losses, 0].sum(1),
        )

    def _finalize_gradients(
        self,
        chunks: list[Any],
        num_tokens: Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """Megatron's ``finalize_model_grads_func``: reduce gradients, then divide by the targets if not yet divided.

        megatron-core 0.16.1, distributed/finalize_model_grads.py divides after ``if num_tokens > 0``, which makes the
        host wait for the GPU; here the division stays on the device, and only happens if the count was unknown.
        """
        finalize_model_grads(
            chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce
        )
        reduce_shared_gradients(chunks, self._topology.pp_group)
        if self._denominators is not None:
            return
        topology = self._topology
        if self._targets_seen:
            count = torch.stack(self._targets_seen).sum()
        else:
            weight = next(chunks[0].parameters())
            count = torch.zeros((), device=weight.device)
        if topology.parallel.pp > 1:
            dist.broadcast(count, topology.last_stage, group=topology.pp_group)
        dist.all_reduce(count, group=topology.dp_group)
        for chunk in chunks:
            chunk.scale_gradients(1.0 / _divisors(count))


_OF_ENGINE = ("megatron.", "lightning_megatron.")
"""Packages whose layers add the gradients of their weights to buffers."""


def _check_are_weights(chunk: torch.nn.Module) -> None:
    """Raise if ``torch.nn.utils`` has replaced weights of the engine's layers by tensors that it computes.

    Such tensors have no buffers for gradients, and checkpoints and exports know the weights by their names.

    Raises:
        ConfigError: If so; it names the first one.
    """
    for name, layer in chunk.named_modules():
        is_of_engine = any(base.__module__.startswith(_OF_ENGINE) for base in type(layer).__mro__)
        source = _computed_from(layer)
        if is_of_engine and source is not None:
            raise ConfigError(
                f"{name}: expected weights of its own, got some that torch.nn.utils computes from {source} (pruning, "
                "weight norm and the like); leave that out, or make it permanent before fit: prune.remove(layer, "
                "'weight')"
            )


def _computed_from(layer: torch.nn.Module) -> str | None:
    """What ``torch.nn.utils`` computes a weight of ``layer`` from; None if it computes none."""
    if parametrize.is_parametrized(layer):
        return "parametrizations"
    for name, _ in layer.named_parameters(recurse=False):
        # The names that pruning and spectral_norm, and weight_norm, give to what they compute from.
        weight, _, suffix = name.rpartition("_")
        value = getattr(layer, weight, None)
        is_computed = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
        if suffix in ("orig", "g") and is_computed:
            return name
    return None


def _uneven_batch(rows: int, num_microbatches: int) -> str:
    """Error message for rows of a full batch that cannot be split into equal microbatches."""
    choices = ", ".join(str(divisor) for divisor in divisors(rows))
    return (
        f"a batch of {rows} rows cannot be cut into num_microbatches={num_microbatches} of equal size; give the "
        f"DataLoader a batch_size that is a multiple of {num_microbatches}, or choose num_microbatches from {choices}"
    )


def _divisors(targets: Tensor) -> Tensor:
    """Numbers of targets, or sums of their weights, to divide by: a batch without targets has loss 0, not 0/0."""
    return targets.masked_fill(targets == 0, 1.0)


def _report(term: LossTerm) -> Tensor:
    """[2], fp32: a term's sum and its number of targets."""
    return torch.stack((term.sum.detach().float(), term.targets.detach().float()))


@contextlib.contextmanager
def _evaluated(chunks: list[Any]) -> Iterator[None]:
    """Within the context, chunks are in evaluation mode, and Megatron's schedule leaves gradient reductions alone.

    megatron-core 0.16.1, pipeline_parallel/schedules.py: a forward pass alone enters ``no_sync_func`` and never leaves.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    modes = [module.training for module in modules]
    configs = [unwrap(chunk).config for chunk in chunks]
    hooks = [config.no_sync_func for config in configs]
    for module in modules:
        module.training = False
    for config in configs:
        config.no_sync_func = None
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for config, hook in zip(configs, hooks, strict=True):
            config.no_sync_func = hook


def _split_rows(batch: Batch, count: int) -> list[Batch]:
    """Split a prepared batch into ``count`` microbatches."""
    chunks = [tensor.chunk(count) for tensor in batch.values()]
    by_microbatch = zip(*chunks, strict=True)
    return [dict(zip(batch, tensors, strict=True)) for tensors in by_microbatch]


def _num_rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
