"""Estimates of memory and step time, and search for layouts that fit, from model config, layout, batch and device.

Activation memory follows Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4, adapted to this
package's layers (no attention matrix is stored). Time is the sum of matrix products (at the rate that the power limit
allows, below the datasheet's), attention, memory traffic of all other operations, exposed communication, and the
pipeline bubble (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). The constants below were fitted
on some runs on H200s and tested on others, all in ``tests/unit/test_planner.py``: peak memory is within 10 %, step time
within 15 %. The runs on several GPUs, and some on one, were measured before kernels were fused around
matrix products and in the optimizer; the constants are a compromise between old and new runs.

Other devices are scaled from an H200 by datasheet: matrix products and attention by peak bf16 FLOP/s, the rest by
memory and link bandwidth. A host has eight GPUs. Speeds between hosts are from datasheets and were not measured;
pipeline communication between stages is assumed to overlap with computation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_megatron import accounting
from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig
from lightning_megatron.errors import ConfigError, divisors
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layout import check_function, check_layout, comm_type_of
from lightning_megatron.models.t5_layout import OVERRIDE

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A type of GPU, with bandwidths by datasheet."""

    name: str
    """As returned by ``torch.cuda.get_device_name``."""
    memory: float
    """Bytes available to a process."""
    memory_bandwidth: float
    """Bytes/s of device memory."""
    link_bandwidth: float
    """Bytes/s per direction to other GPUs of the host."""
    network_bandwidth: float
    """Bytes/s per direction to other hosts; assumes one network adapter per GPU."""


DEVICES = {
    "b200": Device("NVIDIA B200", 178 * GIB, 8.0e12, 900e9, 50e9),
    "h200": Device("NVIDIA H200", 139 * GIB, 4.8e12, 450e9, 50e9),
    "h100": Device("NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, 50e9),
    "a100": Device("NVIDIA A100-SXM4-80GB", 79 * GIB, 2.04e12, 300e9, 25e9),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", 39 * GIB, 1.56e12, 300e9, 25e9),
}
"""Device by its name for ``plan --device``."""

# Fitted constants; rates are those of an H200.
_PRODUCTS_SHARE, _PRODUCTS_LOSS = 0.692, 100
"""Share of the datasheet's peak that matrix products reach under the power limit; it is multiplied by
n / (n + ``_PRODUCTS_LOSS``) for n = hidden size, and again for n = tokens of a microbatch."""
_ATTENTION_SHARE, _DROPPED_ATTENTION_SHARE = 0.47, 0.0031
"""Share of the peak that attention reaches; with dropout (FlashAttention-2), the share per channel of a head."""
_BIASED_ATTENTION_SHARE = 0.07
"""The same for a T5, whose relative position bias has gradients."""
_OTHER_TRAFFIC = 4.0
"""Bytes moved by norms, activations, residuals and rotary embeddings, forward and backward, per activation byte."""
_EXPERTS_TRAFFIC, _EXPERTS_SLOWDOWN = 33, 4
"""Passes over the inputs of experts, forward and backward, including sorting, summation and the inefficiency of small
products; slowdown of all-to-alls by uneven splits, including synchronization with the host."""
_LOSS_TRAFFIC, _LOSS_BYTES = 11.0, 4.5
"""Bytes moved, and bytes allocated, per logit of the cross-entropy, gradient included."""
_STEP_TRAFFIC, _GRADIENT_TRAFFIC = 34.0, 12.0
"""Bytes moved per parameter by the optimizer, and by zeroing and accumulating gradients."""
_MEMORY_SHARE, _LINK_SHARE = 0.89, {2: 0.48}
"""Achieved share of the bandwidths; that of links by group size, 0.66 for sizes not listed."""
_TP_EXPOSED, _TP_COPIES_EXPOSED, _DP_EXPOSED = 8, 1.5, 0.25
"""Exposed collectives of a layer (of 10, forward and backward) with NCCL, and as peer copies between two GPUs; share of
the gradient reduction that compute does not hide."""
_RANKS_PER_HOST = 8
_IDLE = 0.014
"""Seconds per step in which the device is idle: Trainer, data, first and last kernel launches."""
_INTERLEAVED = 0.7e-3
"""Seconds per microbatch and model chunk of an interleaved schedule: exposed communication, and Python."""
_HOST, _HOST_DECODER, _HOST_TP = 3.0e-3, 1.6, 1.3
"""Seconds that Python takes to launch the kernels of a layer and microbatch, forward and backward: a lower bound of its
time; factors for a decoder layer with cross-attention, and for tensor-parallel collectives."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Model, batch and layout of a training run."""

    model: ModelConfig
    lengths: tuple[int, ...]
    """Tokens of a row; for a T5 those of the encoder and of the decoder."""
    world_size: int
    """Number of GPUs."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: int = 1
    """Rows of a microbatch."""
    distributed_optimizer: bool = True
    """Whether the optimizer's state is sharded over data-parallel ranks."""
    recompute: Literal["selective", "full"] | None = None
    """What the backward pass recomputes: norms and activation functions of MLPs, or full layers."""
    precision: str = "bf16-mixed"
    """The Trainer's precision."""
    cuda_graphs: bool = False
    """Whether microbatches are replayed as CUDA graphs, without launches from Python."""
    layout: tuple[int, ...] = field(default=())
    """Number of layers of each model chunk; empty for the default of ``parallel``."""

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.parallel.data_parallel_size(self.world_size)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.precision == "32-true" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks, padding included."""
        return self.micro_batch_size * sum(self.lengths) * self.parallel.num_microbatches * self.dp

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of a microbatch per context-parallel rank, padding included."""
        return self.micro_batch_size * sum(self.lengths) / self.parallel.cp

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of layers of each model chunk in pipeline order."""
        return self.layout or accounting.chunk_layout(self.model, self.parallel)

    def layers(self, pp_rank: int) -> list[int]:
        """Indices in the whole model of a stage's layers, a T5's decoder after its encoder."""
        ends = list(itertools.accumulate(self.chunks, initial=0))
        own = range(pp_rank, len(self.chunks), self.parallel.pp)
        return [layer for chunk in own for layer in range(ends[chunk], ends[chunk + 1])]

    def parameters(self, pp_rank: int) -> dict[int, int]:
        """Number of parameters on one rank of a stage, by the size of the group that replicates them."""
        model, parallel = self.model, self.parallel
        count = accounting.rank_parameters(
            model, self.chunks, tp=parallel.tp, pp=parallel.pp, pp_rank=pp_rank, ep=parallel.ep
        )
        experts = (
            sum(accounting.expert_parameters(model, layer) for layer in self.layers(pp_rank))
            // parallel.ep
        )
        replicas = self.dp * parallel.cp
        return Counter({replicas: count - experts}) + Counter(
            {replicas * parallel.tp // parallel.ep: experts}
        )

    def trained(self, pp_rank: int) -> dict[int, float]:
        """``parameters`` with gradients; LoRA adapters are assumed to be spread evenly."""
        adapters = accounting.adapter_parameters(self.model) / (self.parallel.tp * self.parallel.pp)
        return {self.dp * self.parallel.cp: adapters} if adapters else {**self.parameters(pp_rank)}

    def optimizer_parameters(self, pp_rank: int) -> float:
        """Number of parameters whose optimizer state one rank of a stage holds."""
        return sum(
            n / (ranks if self.distributed_optimizer else 1)
            for ranks, n in self.trained(pp_rank).items()
        )

    def peak_flops_per_s(self, device: Device) -> float | None:
        """Peak FLOP/s of one device for matrix products; None if the datasheet does not give it."""
        return accounting.peak_flops_per_s(
            device.name, "tf32" if self.precision == "32-true" else "bf16"
        )


class _Breakdown:
    """Base of dataclasses whose fields add up to a total."""

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class Memory(_Breakdown):
    """Bytes of the fullest rank, by use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float


@dataclass(frozen=True, kw_only=True)
class StepTime(_Breakdown):
    """Seconds of one optimizer step on the slowest stage, by cause."""

    products: float
    attention: float
    other: float
    """Norms, activations, residuals, cross-entropy."""
    optimizer: float = 0.0
    communication: float
    """Communication that is not overlapped with compute."""
    bubble: float = 0.0
    """Waiting for other pipeline stages."""
    idle: float = 0.0
    """Waiting for the host: data, the Trainer, and launches from Python that take longer than their kernels."""


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(run: Run) -> Memory:
    """Peak memory of the fullest rank, without that of CUDA and NCCL themselves."""
    return max(
        (_stage_memory(run, rank) for rank in range(run.parallel.pp)), key=lambda stage: stage.total
    )


def _stage_memory(run: Run, pp_rank: int) -> Memory:
    parameters, trained = sum(run.parameters(pp_rank).values()), sum(run.trained(pp_rank).values())
    return Memory(
        weights=run.bytes_per_element * parameters,
        gradients=4.0 * trained,
        # Adam's two moments, and an fp32 master copy of 16-bit weights.
        optimizer=(8.0 if run.bytes_per_element == 4 else 12.0) * run.optimizer_parameters(pp_rank),
        activations=_activation_bytes(run, pp_rank),
        logits=_logits_bytes(run, pp_rank),
    )


def _activation_bytes(run: Run, pp_rank: int) -> float:
    """Bytes of activations on a stage when most microbatches are in flight."""
    parallel, layers = run.parallel, run.layers(pp_rank)
    chunks = parallel.num_model_chunks
    in_flight = min(_warm_up(parallel, pp_rank) + 1, parallel.num_microbatches * chunks) / chunks
    kept = sum(_layer_bytes(run, layer, recompute=run.recompute == "selective") for layer in layers)
    if run.recompute != "full":
        return in_flight * kept
    # Layers are recomputed one at a time, after the logits have been freed.
    inputs = run.bytes_per_element * run.tokens_per_rank * run.model.hidden_size * len(layers)
    inputs *= in_flight / (parallel.tp if parallel.uses_sequence_parallel else 1)
    return inputs + max(0.0, kept / len(layers) - _logits_bytes(run, pp_rank))


def _logits(run: Run, pp_rank: int) -> float:
    """Number of logits of a microbatch on one rank; 0 except on the last stage."""
    parallel, model = run.parallel, run.model
    if pp_rank < parallel.pp - 1 or not model.has_output_layer:
        return 0.0
    padded = model.padded_vocab_size(parallel.tp)
    return run.micro_batch_size * run.lengths[-1] * padded / (parallel.tp * parallel.cp)


def _logits_bytes(run: Run, pp_rank: int) -> float:
    """Bytes of the logits and their gradients."""
    return _LOSS_BYTES * run.bytes_per_element / 2 * _logits(run, pp_rank)


def _ranks_per_token(run: Run) -> float:
    """Expected number of ranks of its ep group to which a token is dispatched, with balanced experts."""
    assert run.model.experts is not None
    return run.parallel.ep * (1 - (1 - 1 / run.parallel.ep) ** run.model.experts.topk)


def _layer_bytes(run: Run, layer: int, *, recompute: bool = False) -> float:
    """Bytes of activations that a layer stores for one microbatch; norms and activations excluded with ``recompute``.

    Per token, in bf16 and before any split over tp: residual stream and norms 8 h, projections 2 (q + k + v), rotated
    queries or T5's copy 2 q, attention output 2 q, MLP 4 f (gated 6 f), 2 h for each expert that the token is routed
    to, and one byte per element with dropout.
    """
    model, parallel, is_decoder = run.model, run.parallel, layer >= run.model.num_layers
    h, f, q = (
        model.hidden_size,
        model.mlp_width(layer),
        model.num_attention_heads * model.kv_channels,
    )
    kv, norms = 2 * model.num_query_groups * model.kv_channels, 2
    topk = model.experts.topk if model.experts is not None and model.has_experts(layer) else 0
    size = (
        8.0 * h + 2 * (q + kv) + 2 * q + (6 if model.gated_linear_unit else 4) * f + 2.0 * h * topk
    )
    size += 2 * q * (model.position_embedding_type == "rope")
    size += 2 * h * (model.hidden_dropout > 0) + f * (model.activation_dropout > 0)
    if is_decoder:
        norms, encoder_ratio = 3, run.lengths[0] / run.lengths[-1]
        size += 4.0 * h + 4 * q + 2 * kv * encoder_ratio + h * (model.hidden_dropout > 0)
    # Inputs of experts that were received from other ranks are not recomputed.
    recomputed = 2.0 * f + 2.0 * h * (
        topk - (_ranks_per_token(run) if topk and parallel.ep > 1 else 0)
    )
    split, stream = (
        size - 4.0 * norms * h - recompute * recomputed,
        2.0 * norms * h * (1 if recompute else 2),
    )
    size = split / parallel.tp + stream / (parallel.tp if parallel.sequence_parallel else 1)
    if (
        parallel.cp > 1 and comm_type_of(model, parallel) == "all_gather"
    ):  # keys and values of all tokens
        size += (parallel.cp - 1) * 2.0 * kv / parallel.tp
    tokens = run.micro_batch_size * run.lengths[-1 if is_decoder else 0]
    return tokens * size * run.bytes_per_element / 2 / parallel.cp


# ---- time -----------------------------------------------------------------------------------------------------------


def step_time(run: Run, device: Device) -> StepTime:
    """Seconds of one optimizer step on the slowest rank.

    The bubble is the time of one microbatch on all other stages (1F1B), divided by the number of model chunks per stage
    (interleaved).

    Raises:
        ConfigError: If the device's peak is unknown.
    """
    parallel, m = run.parallel, run.parallel.num_microbatches
    stages = [_microbatch_time(run, rank, device) for rank in range(parallel.pp)]
    slowest = max(stages, key=lambda stage: stage.total)
    bubble = (sum(stage.total for stage in stages) - slowest.total) / parallel.num_model_chunks
    fullest = max(range(parallel.pp), key=lambda rank: sum(run.parameters(rank).values()))
    trained, optimizer = run.trained(fullest), run.optimizer_parameters(fullest)
    bandwidth = _MEMORY_SHARE * device.memory_bandwidth
    stage_size = run.dp * parallel.cp * parallel.tp
    reduced = sum(
        6.0 * n * (ranks - 1) / ranks / _link(device, ranks, stride=stage_size // ranks)
        for ranks, n in trained.items()
    )
    # It overlaps at most with the last backward pass, and with the first forward pass of the next step.
    exposed = max(_DP_EXPOSED * reduced, reduced - slowest.total)
    return StepTime(
        products=m * slowest.products,
        attention=m * slowest.attention,
        other=m * slowest.other,
        optimizer=(optimizer * _STEP_TRAFFIC + sum(trained.values()) * _GRADIENT_TRAFFIC)
        / bandwidth,
        communication=m * slowest.communication + exposed,
        bubble=bubble,
        idle=_IDLE + m * slowest.idle,
    )


def _microbatch_time(run: Run, pp_rank: int, device: Device) -> StepTime:
    """Seconds of one microbatch on one stage, forward and backward."""
    parallel = run.parallel
    peak = run.peak_flops_per_s(device)
    if peak is None:
        raise ConfigError(
            f"precision={run.precision}: expected a device with a known peak, got {device.name}; use another"
        )
    layers = run.layers(pp_rank)
    products, scores = _flops_of_a_row(run, pp_rank, layers)
    rate = _PRODUCTS_SHARE * peak
    for size in (run.model.hidden_size, run.tokens_per_rank):
        rate *= size / (size + _PRODUCTS_LOSS)
    shards = parallel.tp * parallel.cp
    busy = StepTime(
        products=run.micro_batch_size * products / shards / rate,
        attention=run.micro_batch_size * scores / shards / (_attention_share(run) * peak),
        other=_other_traffic(run, pp_rank, layers) / (_MEMORY_SHARE * device.memory_bandwidth),
        communication=_exposed_communication(run, layers, device),
    )
    if run.cuda_graphs:
        return busy
    host = _host_seconds(run, layers)
    return replace(busy, idle=max(0.0, host - busy.total))


def _flops_of_a_row(run: Run, pp_rank: int, layers: Sequence[int]) -> tuple[float, float]:
    """FLOPs of matrix products and of attention scores that one row takes in a stage, forward and backward."""
    model = run.model
    flops = [accounting.layer_flops(model, run.lengths, layer) for layer in layers]
    passes = 3.0
    if model.lora is not None:
        passes = 2.0  # frozen weights have no gradients
    products = passes * sum(linears for linears, _ in flops)
    scores = 3.5 * sum(scores for _, scores in flops)
    if run.recompute == "full":
        products = products * (passes + 1) / passes
        scores = scores * 4.5 / 3.5
    if pp_rank == run.parallel.pp - 1:
        vocab_size = model.padded_vocab_size(run.parallel.tp)
        products += passes * accounting.head_flops(model, run.lengths, vocab_size)
    return products, scores


def _attention_share(run: Run) -> float:
    """Share of the device's peak that attention reaches."""
    model = run.model
    if model.architecture == "t5":
        return _BIASED_ATTENTION_SHARE
    if model.attention_dropout > 0:
        return _DROPPED_ATTENTION_SHARE * model.kv_channels
    return _ATTENTION_SHARE


def _repeated_share(run: Run) -> float:
    """Share of the time outside of matrix products that recomputation repeats."""
    return {None: 0.0, "selective": 0.15, "full": 1 / 3}[run.recompute]


def _other_traffic(run: Run, pp_rank: int, layers: Sequence[int]) -> float:
    """Bytes that a stage moves in device memory outside of matrix products and attention."""
    model = run.model
    traffic = (
        _OTHER_TRAFFIC
        * (1 + _repeated_share(run))
        * sum(_layer_bytes(run, layer) for layer in layers)
    )
    traffic += _LOSS_TRAFFIC * _logits(run, pp_rank)
    if model.experts is not None:
        routed_rows = run.tokens_per_rank * model.experts.topk
        routed = run.bytes_per_element * routed_rows * model.hidden_size / run.parallel.tp
        traffic += _EXPERTS_TRAFFIC * routed * sum(model.has_experts(layer) for layer in layers)
    return traffic


def _exposed_communication(run: Run, layers: Sequence[int], device: Device) -> float:
    """Seconds of communication that no computation hides."""
    parallel = run.parallel
    hidden_bytes = (
        run.bytes_per_element * run.tokens_per_rank / len(run.lengths) * run.model.hidden_size
    )
    message = hidden_bytes * (parallel.tp - 1) / parallel.tp
    copies = parallel.tp == 2 and parallel.uses_sequence_parallel and run.recompute != "selective"
    exposed = _TP_COPIES_EXPOSED if copies else _TP_EXPOSED
    exchanged = sum(_exchanged_bytes(run, layer) for layer in layers)
    interleaved = _INTERLEAVED * parallel.num_model_chunks * (parallel.num_model_chunks > 1)
    return (
        _dispatch_seconds(run, layers, hidden_bytes, device)
        + len(layers) * exposed * message / _link(device, parallel.tp, stride=1)
        + exchanged / _link(device, parallel.cp, stride=parallel.tp)
        + interleaved
    )


def _dispatch_seconds(
    run: Run, layers: Sequence[int], hidden_bytes: float, device: Device
) -> float:
    """Seconds in which experts get their rows and return them, in both passes."""
    model = run.model
    parallel = run.parallel
    if model.experts is None or parallel.ep == 1:
        return 0.0
    split = parallel.tp if parallel.uses_sequence_parallel else 1
    dispatch = 4 * _ranks_per_token(run) * hidden_bytes / split * (1 - 1 / parallel.ep)
    dispatch *= _EXPERTS_SLOWDOWN / _link(device, parallel.ep, stride=1)
    return dispatch * sum(model.has_experts(layer) for layer in layers)


def _host_seconds(run: Run, layers: Sequence[int]) -> float:
    """Seconds that Python takes to launch the kernels of a microbatch."""
    launches = sum(_HOST_DECODER if layer >= run.model.num_layers else 1.0 for layer in layers)
    slowdown = _HOST_TP if run.parallel.tp > 1 else 1.0
    return _HOST * launches * slowdown * (1 + _repeated_share(run))


def _exchanged_bytes(run: Run, layer: int) -> float:
    """Bytes that a rank receives over the cp group in the attentions of a layer, forward and backward; all exposed.

    With all-to-all: queries, keys, values, outputs and their gradients. With all-gather: keys and values of all tokens,
    and their gradients in float32.
    """
    model, cp = run.model, run.parallel.cp
    if cp == 1:
        return 0.0
    is_decoder = layer >= model.num_layers
    q, kv = (n * model.kv_channels for n in (model.num_attention_heads, 2 * model.num_query_groups))
    tokens = run.lengths[-1 if is_decoder else 0]
    queries, keys = 2 * q * tokens, kv * tokens
    if is_decoder:  # and cross-attention
        queries, keys = 2 * queries, keys + kv * run.lengths[0]
    passes = 3 if run.recompute == "full" else 2
    moved = passes * run.bytes_per_element * (queries + keys) / cp
    if comm_type_of(model, run.parallel) == "all_gather":
        moved = ((passes - 1) * run.bytes_per_element + 4) * keys
    return run.micro_batch_size * moved / run.parallel.tp * (cp - 1) / cp


def _link(device: Device, ranks: int, *, stride: int) -> float:
    """Bytes/s per rank in a collective over a group of ``ranks`` that are ``stride`` apart.

    Between hosts the group's ranks on a host each have a network adapter, and the rings are spread over these.
    """
    within = device.link_bandwidth * _LINK_SHARE.get(ranks, 0.66)
    if ranks * stride <= _RANKS_PER_HOST:
        return within
    return min(within, 0.66 * device.network_bandwidth * max(1, _RANKS_PER_HOST // stride))


# ---- the Trainer's run ----------------------------------------------------------------------------------------------


def make_run(
    model: ModelConfig,
    settings: EngineSettings,
    *,
    rows: int,
    lengths: tuple[int, ...],
    world_size: int,
) -> Run:
    """Build a ``Run`` from the settings of a strategy.

    Args:
        model: Model config.
        settings: Settings of the strategy.
        rows: Rows of a microbatch; 0 if unknown, which leaves out activations.
        lengths: Tokens of a row; for a T5 those of the encoder and of the decoder.
        world_size: Number of GPUs.
    """
    granularity, method = settings.recompute.granularity, settings.recompute.method
    return Run(
        model=model,
        parallel=settings.parallel,
        micro_batch_size=rows,
        lengths=lengths,
        world_size=world_size,
        distributed_optimizer=settings.distributed_optimizer,
        recompute=None if granularity == "full" and method == "block" else granularity,
        precision="32-true" if settings.params_dtype.itemsize == 4 else "bf16-mixed",
        cuda_graphs=settings.cuda_graphs,
        layout=accounting.chunk_layout(
            model, settings.parallel, settings.overrides.transformer.get(OVERRIDE)
        ),
    )


# ---- search for layouts ---------------------------------------------------------------------------------------------

_RESERVED = 0.04
"""Share of a device's memory reserved for CUDA, NCCL and fragmentation."""
_MIN_TOKENS_PER_CP_RANK = 4096
"""Minimum tokens of a row per context-parallel rank; below it, data parallelism does as well."""
_MAX_MICRO_BATCH_SIZE = 64
_MAX_UNEVENNESS = 4
"""Layers per model chunk by which first and last stage may differ from an even split."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its estimated memory and step time."""

    run: Run
    memory: Memory
    time: StepTime

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput per GPU, padding included."""
        return self.run.tokens / self.time.total / self.run.world_size


def plan(run: Run, device: Device) -> Plan:
    """Estimate memory and step time of a run."""
    return Plan(run=run, memory=memory(run), time=step_time(run, device))


def _seconds(plan: Plan) -> float:
    return plan.time.total


def plans(run: Run, global_batch_size: int, device: Device) -> list[Plan]:
    """Layouts that fit, fastest first: the best one for each tp, pp and cp, with and without vpp.

    Tensor and context parallelism stay within a host of eight GPUs. Sequence parallelism is used wherever possible with
    the former; the latter is considered for rows of 8,192 tokens or more.

    Args:
        run: Model, rows, precision and number of GPUs; all other fields are searched.
        global_batch_size: Rows of a step over all GPUs.
        device: Type of the GPUs.

    Raises:
        ConfigError: If no layout fits; gives the memory that the smallest needs.
    """
    best: dict[tuple[int, int, int, bool], Plan] = {}
    smallest: Plan | None = None
    for candidate in (plan(layout, device) for layout in _candidates(run, global_batch_size)):
        smallest = min(smallest or candidate, candidate, key=lambda plan: plan.memory.total)
        if candidate.memory.total <= (1 - _RESERVED) * device.memory:
            parallel = candidate.run.parallel
            key = parallel.tp, parallel.pp, parallel.cp, parallel.vpp is None
            best[key] = min(best.get(key, candidate), candidate, key=_seconds)
    if smallest is None:
        raise ConfigError(
            f"global_batch_size={global_batch_size}: expected one that {run.world_size} GPUs can share in a layout of "
            "this model, got none; choose a multiple of the number of GPUs"
        )
    if not best:
        needed, parallel = smallest.memory.total / (1 - _RESERVED) / GIB, smallest.run.parallel
        raise ConfigError(
            f"memory: expected at least {needed:.1f} GiB a GPU (tp={parallel.tp} pp={parallel.pp} cp={parallel.cp}, "
            f"recompute={smallest.run.recompute}), got {device.memory / GIB:.1f} GiB; use more GPUs or shorter rows"
        )
    return sorted((_balance(even, device) for even in best.values()), key=_seconds)


def _balance(even: Plan, device: Device) -> Plan:
    """Give the stages with the embedding and the output layer fewer layers, if that is faster."""
    run, best, parallel = even.run, even, even.run.parallel
    layers, chunks, share = (
        run.model.num_layers,
        parallel.num_model_chunks,
        run.model.num_layers // parallel.pp,
    )
    if parallel.pp == 1 or run.model.architecture == "t5":
        return even
    for last in range(max(chunks, share - _MAX_UNEVENNESS * chunks), share, chunks):
        for first in (
            range(last, share + _MAX_UNEVENNESS * chunks + 1, chunks)
            if parallel.pp > 2
            else (layers - last,)
        ):
            ends: dict[str, Any] = dict(zip(UNEVEN_STAGES, (first, last), strict=True))
            uneven = replace(run, parallel=replace(parallel, **ends))
            if (
                _is_valid(uneven)
                and (other := plan(uneven, device)).memory.total <= (1 - _RESERVED) * device.memory
            ):
                best = min(best, other, key=_seconds)
    return best


def _candidates(run: Run, global_batch_size: int) -> Iterator[Run]:
    """All layouts and microbatch sizes that are valid for the model and the batch."""
    model, lengths = run.model, run.lengths
    max_cp, layers = (
        max(1, min(lengths) // _MIN_TOKENS_PER_CP_RANK),
        model.num_layers + model.num_decoder_layers,
    )
    within_host = [size for size in divisors(run.world_size) if size <= _RANKS_PER_HOST]
    pairs = [
        (tp, cp)
        for tp in within_host
        for cp in within_host
        if cp <= max_cp and tp * cp in within_host
    ]
    for (tp, cp), pp in (
        (pair, pp) for pair in pairs for pp in divisors(run.world_size // math.prod(pair))
    ):
        rows, rest = divmod(global_batch_size, dp := run.world_size // (tp * cp * pp))
        eps = divisors(math.gcd(tp * cp * dp, model.experts.num_experts)) if model.experts else [1]
        for size in (n for n in divisors(rows) if n <= _MAX_MICRO_BATCH_SIZE and rest == 0):
            can_interleave = pp > 1 and rows // size % pp == 0
            vpps = (None, *(range(2, layers // pp + 1) if can_interleave else ()))
            for vpp, ep in itertools.product(vpps, (n for n in eps if n <= _RANKS_PER_HOST)):
                parallel = ParallelConfig(
                    tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, num_microbatches=rows // size,
                    sequence_parallel=tp > 1 and all(length % (tp * cp) == 0 for length in lengths),
                )  # fmt: skip
                valid = replace(run, parallel=parallel, micro_batch_size=size)
                if _is_valid(valid):
                    yield from (
                        valid,
                        replace(valid, recompute="selective"),
                        replace(valid, recompute="full"),
                    )


def _is_valid(run: Run) -> bool:
    try:
        check_layout(run.model, run.parallel)
        for length in run.lengths:
            run.parallel.check_sequence(length)
        check_function(run.model, run.parallel, "fit")
    except ConfigError:
        return False
    return True


# ---- timeline of the pipeline ---------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Forward or backward pass of one model chunk for one microbatch."""

    chunk: int
    """Index of the model chunk on its stage, from 0."""
    microbatch: int
    is_forward: bool
    start: float
    """Seconds from the start of the step."""
    seconds: float


def timeline(run: Run, device: Device) -> list[list[Slot]]:
    """Schedule of each pipeline stage: megatron-core's 1F1B or interleaved schedule.

    A backward pass takes twice as long as a forward pass; the chunks of a stage share its time evenly.
    """
    pp, chunks = run.parallel.pp, run.parallel.num_model_chunks
    seconds = [_microbatch_time(run, rank, device).total / chunks for rank in range(pp)]
    orders = [_order(run.parallel, rank) for rank in range(pp)]
    ends: dict[tuple[int, int, bool], float] = {}
    slots: list[list[Slot]] = [[] for _ in range(pp)]
    while any(len(slots[rank]) < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            for chunk, microbatch, is_forward in orders[rank][len(slots[rank]) :]:
                position = chunk * pp + rank  # of the chunk in the whole model
                previous = position - 1 if is_forward else position + 1
                needed = (previous, microbatch, is_forward)
                if previous == pp * chunks:  # the first backward pass follows the last forward pass
                    needed = (position, microbatch, True)
                if previous >= 0 and needed not in ends:
                    break
                free = slots[rank][-1].start + slots[rank][-1].seconds if slots[rank] else 0.0
                start, duration = (
                    max(free, ends.get(needed, 0.0)),
                    seconds[rank] * (1 if is_forward else 2) / 3,
                )
                slots[rank].append(Slot(chunk, microbatch, is_forward, start, duration))
                ends[position, microbatch, is_forward] = start + duration
    return slots


def _order(parallel: ParallelConfig, pp_rank: int) -> list[tuple[int, int, bool]]:
    """(chunk, microbatch, is_forward) of a stage's passes in order, as in megatron-core 0.16.1's schedules.py."""
    pp, v, m = parallel.pp, parallel.num_model_chunks, parallel.num_microbatches
    warm_up = _warm_up(parallel, pp_rank)
    forward = [
        (chunk, first + i)
        for first in range(0, m, pp)
        for chunk in range(v)
        for i in range(min(pp, m - first))
    ]
    backward = [(v - 1 - chunk, microbatch) for chunk, microbatch in forward]
    order = [(*step, True) for step in forward[:warm_up]]
    for next_forward, next_backward in zip(forward[warm_up:], backward, strict=False):
        order += [(*next_forward, True), (*next_backward, False)]
    return order + [(*step, False) for step in backward[max(0, len(forward) - warm_up) :]]


def _warm_up(parallel: ParallelConfig, pp_rank: int) -> int:
    """Number of warm-up forward passes of a stage, before forward and backward passes alternate."""
    later_stages, chunks = parallel.pp - pp_rank - 1, parallel.num_model_chunks
    return later_stages * 2 + (chunks - 1) * parallel.pp if chunks > 1 else later_stages
