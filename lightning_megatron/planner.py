"""Memory, step time and the layouts that fit: arithmetic on a model's shape, a layout, a batch and a device.

Memory follows Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4, for what this package's layers
keep (attention without a matrix of scores). Time is the sum of matrix products (at the rate that the power limit
allows, below the datasheet's), attention, memory traffic of everything else, exposed communication, and the bubble of
the schedule (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). The constants below were fitted on
some runs on H200s and tested on others, all listed in ``tests/unit/test_planner.py``: peak memory is within 10 %, the
time of a step within 15 %. The runs on several GPUs, and some on one, were measured before kernels were fused around
matrix products and in the optimizer; the constants are a compromise between old and new runs.

Other devices are scaled from an H200 by datasheet: matrix products and attention by the peak in bf16, the rest by
memory and link bandwidth. A host has eight GPUs. Speeds between hosts are from datasheets and were not measured;
messages between stages are assumed to overlap with computation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_megatron import accounting
from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig
from lightning_megatron.errors import ConfigError, divisors
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE

if TYPE_CHECKING:
    from lightning_megatron.models.transformer_config import EngineSettings

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What a layout is planned for; bandwidths by datasheet."""

    name: str
    """As ``torch.cuda.get_device_name`` says it."""
    memory: float
    """Bytes that a process can allocate."""
    memory_bandwidth: float
    """Bytes/s of its own memory."""
    link_bandwidth: float
    """Bytes/s to the other GPUs of a host, one direction."""
    network_bandwidth: float
    """Bytes/s to other hosts, one direction; of the adapter that each GPU of a usual host has for itself."""


DEVICES = {
    "b200": Device("NVIDIA B200", 178 * GIB, 8.0e12, 900e9, 50e9),
    "h200": Device("NVIDIA H200", 139 * GIB, 4.8e12, 450e9, 50e9),
    "h100": Device("NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, 50e9),
    "a100": Device("NVIDIA A100-SXM4-80GB", 79 * GIB, 2.04e12, 300e9, 25e9),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", 39 * GIB, 1.56e12, 300e9, 25e9),
}
"""Devices by the word of ``plan --device``."""

# Fitted constants, of an H200 where they are rates.
_PRODUCTS_SHARE, _PRODUCTS_LOSS = 0.692, 100
"""Share of the datasheet's peak that matrix products reach under the power limit, times n / (n + second), n being the
model's width, and again with n the tokens of a microbatch."""
_ATTENTION_SHARE, _DROPPED_ATTENTION_SHARE = 0.47, 0.0031
"""Share of the peak that attention reaches; with dropout, where FlashAttention-2 serves, for each channel of a head."""
_BIASED_ATTENTION_SHARE = 0.07
"""The same for a T5's, whose bias has gradients."""
_GLUE_TRAFFIC = 4.0
"""Bytes that norms, activations, residuals and rotations move, forward and backward, for each byte kept."""
_EXPERTS_PASSES, _EXPERTS_WAITS = 33, 4
"""How often the rows that experts read are moved, forward and backward, sorting, adding up and what products of few
rows take longer included; how much longer their all-to-alls of uneven parts take, the host's waits included."""
_LOSS_TRAFFIC, _LOSS_BYTES = 11.0, 4.5
"""Bytes moved, and bytes held, for each logit of the cross-entropy, its gradient included."""
_STEP_TRAFFIC, _GRADIENT_TRAFFIC = 34.0, 12.0
"""Bytes that the optimizer moves for each parameter it steps, and that gradients' zeroing and adding move for each."""
_MEMORY_SHARE, _LINK_SHARE = 0.89, {2: 0.48}
"""Share of the bandwidths that is reached; of links by ranks of a group, 0.66 for more than named."""
_TP_EXPOSED, _TP_COPIES_EXPOSED, _DP_EXPOSED = 8, 1.5, 0.25
"""Collectives of a layer (of 10, forward and backward), by NCCL and as copies of two GPUs, and the share of the
gradients' that compute does not hide."""
_RANKS_OF_A_HOST = 8
_IDLE = 0.014
"""Seconds a step in which the device waits: Trainer, data, first and last launches."""
_INTERLEAVED = 0.7e-3
"""Seconds that each chunk of an interleaved stage adds to a microbatch: messages that are not hidden, and Python."""
_HOST, _HOST_DECODER, _HOST_TP = 3.0e-3, 1.6, 1.3
"""Seconds in which Python launches the kernels of a layer's microbatch, forward and backward: no layer is faster. How
much longer it takes for a decoder's layer with two attentions, and with collectives of tp."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a step computes and how it is split."""

    model: ModelConfig
    lengths: tuple[int, ...]
    """Tokens of a row; of a T5 those of the encoder and of the decoder."""
    world_size: int
    """GPUs."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: int = 1
    """Rows of a microbatch."""
    distributed_optimizer: bool = True
    """Whether data-parallel ranks share the optimizer's state."""
    recompute: Literal["selective", "full"] | None = None
    """What is computed again in the backward pass: norms and activations of MLPs, or whole layers."""
    precision: str = "bf16-mixed"
    """Of the Trainer."""
    cuda_graphs: bool = False
    """Whether microbatches are replayed, so that Python launches nothing."""
    layout: tuple[int, ...] = field(default=())
    """Layers of each chunk; empty for the even one."""

    @property
    def dp(self) -> int:
        """Copies of the model."""
        return self.parallel.data_parallel_size(self.world_size)

    @property
    def bytes_per_number(self) -> int:
        """Of weights and activations."""
        return 4 if self.precision == "32-true" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks, padding included."""
        return self.micro_batch_size * sum(self.lengths) * self.parallel.num_microbatches * self.dp

    @property
    def tokens_of_rank(self) -> float:
        """Those of a microbatch that a rank of the cp group computes, padding included."""
        return self.micro_batch_size * sum(self.lengths) / self.parallel.cp

    @property
    def chunks(self) -> tuple[int, ...]:
        """Layers of each chunk in the order of the pipeline."""
        return self.layout or accounting.chunk_layout(self.model, self.parallel)

    def layers(self, pp_rank: int) -> list[int]:
        """Those of a stage, counted from 0 in the whole model, a T5's decoder after its encoder."""
        ends = list(itertools.accumulate(self.chunks, initial=0))
        mine = range(pp_rank, len(self.chunks), self.parallel.pp)
        return [layer for chunk in mine for layer in range(ends[chunk], ends[chunk + 1])]

    def parameters(self, pp_rank: int) -> dict[int, int]:
        """On one rank of a stage, by how many ranks of it hold the same ones and reduce their gradients."""
        model, parallel = self.model, self.parallel
        count = accounting.rank_parameters(
            model, self.chunks, tp=parallel.tp, pp=parallel.pp, pp_rank=pp_rank, ep=parallel.ep
        )
        experts = sum(accounting.expert_parameters(model, layer) for layer in self.layers(pp_rank)) // parallel.ep
        copies = self.dp * parallel.cp
        return Counter({copies: count - experts}) + Counter({copies * parallel.tp // parallel.ep: experts})

    def trained(self, pp_rank: int) -> dict[int, float]:
        """Those of ``parameters`` that have gradients; adapters are taken to be spread evenly."""
        adapters = accounting.adapter_parameters(self.model) / (self.parallel.tp * self.parallel.pp)
        return {self.dp * self.parallel.cp: adapters} if adapters else {**self.parameters(pp_rank)}

    def optimizer_parameters(self, pp_rank: int) -> float:
        """Those whose optimizer's state one rank of a stage holds."""
        return sum(n / (ranks if self.distributed_optimizer else 1) for ranks, n in self.trained(pp_rank).items())

    def peak_flops_per_s(self, device: Device) -> float | None:
        """Of the matrix products of one device; None where the datasheet is silent."""
        return accounting.peak_flops_per_s(device.name, "tf32" if self.precision == "32-true" else "bf16")


class _Parts:
    """What adds up from the fields of a dataclass."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class Memory(_Parts):
    """Bytes of the fullest rank, by what holds them."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float


@dataclass(frozen=True, kw_only=True)
class StepTime(_Parts):
    """Seconds of one optimizer step on the slowest stage, by what takes them."""

    products: float
    attention: float
    other: float
    """Norms, activations, residuals, cross-entropy."""
    optimizer: float = 0.0
    communication: float
    """What compute does not hide."""
    bubble: float = 0.0
    """Waiting for other stages."""
    idle: float = 0.0
    """Waiting for the host: data, the Trainer, and Python where kernels are shorter than their launches."""


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory(run: Run) -> Memory:
    """Peak bytes of the rank that holds most, without what CUDA and NCCL take for themselves."""
    return max((_stage_memory(run, rank) for rank in range(run.parallel.pp)), key=lambda each: each.total)


def _stage_memory(run: Run, pp_rank: int) -> Memory:
    parameters, trained = sum(run.parameters(pp_rank).values()), sum(run.trained(pp_rank).values())
    return Memory(
        weights=run.bytes_per_number * parameters,
        gradients=4.0 * trained,
        # Adam's two moments, and a master copy of weights that are not fp32 themselves.
        optimizer=(8.0 if run.bytes_per_number == 4 else 12.0) * run.optimizer_parameters(pp_rank),
        activations=_kept_layers(run, pp_rank),
        logits=_logits_bytes(run, pp_rank),
    )


def _kept_layers(run: Run, pp_rank: int) -> float:
    """Bytes of activations at the moment when most microbatches are under way on a stage."""
    parallel, layers = run.parallel, run.layers(pp_rank)
    chunks = parallel.num_model_chunks
    under_way = min(_warm_up(parallel, pp_rank) + 1, parallel.num_microbatches * chunks) / chunks
    kept = sum(_layer_bytes(run, layer, remakes=run.recompute == "selective") for layer in layers)
    if run.recompute != "full":
        return under_way * kept
    # One layer is made again at a time, when the logits are gone.
    inputs = run.bytes_per_number * run.tokens_of_rank * run.model.hidden_size * len(layers)
    inputs *= under_way / (parallel.tp if parallel.uses_sequence_parallel else 1)
    return inputs + max(0.0, kept / len(layers) - _logits_bytes(run, pp_rank))


def _logits(run: Run, pp_rank: int) -> float:
    """Those of a microbatch that a rank computes, on the last stage."""
    parallel, model = run.parallel, run.model
    if pp_rank < parallel.pp - 1 or not model.has_output_layer:
        return 0.0
    padded = model.padded_vocab_size(parallel.tp)
    return run.micro_batch_size * run.lengths[-1] * padded / (parallel.tp * parallel.cp)


def _logits_bytes(run: Run, pp_rank: int) -> float:
    """Of the logits and their gradients."""
    return _LOSS_BYTES * run.bytes_per_number / 2 * _logits(run, pp_rank)


def _ranks_of_a_token(run: Run) -> float:
    """To how many ranks of its ep group a token goes, if all experts are chosen equally often."""
    assert run.model.experts is not None
    return run.parallel.ep * (1 - (1 - 1 / run.parallel.ep) ** run.model.experts.topk)


def _layer_bytes(run: Run, layer: int, *, remakes: bool = False) -> float:
    """What a layer keeps of one microbatch; without the outputs of norms and activations if it ``remakes`` them.

    For a token, in bf16 and before any split over tp: residual stream and norms 8 h, projections 2 (q + k + v), the
    rotated queries or T5's copy 2 q, the attention's output 2 q, the MLP 4 f or gated 6 f, 2 h for each copy of it that
    goes to an expert, and a byte for each element that may be dropped.
    """
    model, parallel, is_decoder = run.model, run.parallel, layer >= run.model.num_layers
    h, f, q = model.hidden_size, model.mlp_width(layer), model.num_attention_heads * model.kv_channels
    kv, norms = 2 * model.num_query_groups * model.kv_channels, 2
    topk = model.experts.topk if model.experts is not None and model.has_experts(layer) else 0
    size = 8.0 * h + 2 * (q + kv) + 2 * q + (6 if model.gated_linear_unit else 4) * f + 2.0 * h * topk
    size += 2 * q * (model.position_embedding_type == "rope")
    size += 2 * h * (model.hidden_dropout > 0) + f * (model.activation_dropout > 0)
    if is_decoder:
        norms, tokens_of_encoder = 3, run.lengths[0] / run.lengths[-1]
        size += 4.0 * h + 4 * q + 2 * kv * tokens_of_encoder + h * (model.hidden_dropout > 0)
    # Of the rows that experts read not what arrives from other ranks.
    again = 2.0 * f + 2.0 * h * (topk - (_ranks_of_a_token(run) if topk and parallel.ep > 1 else 0))
    split, stream = size - 4.0 * norms * h - remakes * again, 2.0 * norms * h * (1 if remakes else 2)
    size = split / parallel.tp + stream / (parallel.tp if parallel.sequence_parallel else 1)
    if parallel.cp > 1 and parallel.comm_type_of(model) == "all_gather":  # keys and values of all tokens
        size += (parallel.cp - 1) * 2.0 * kv / parallel.tp
    tokens = run.micro_batch_size * run.lengths[-1 if is_decoder else 0]
    return tokens * size * run.bytes_per_number / 2 / parallel.cp


# ---- time -----------------------------------------------------------------------------------------------------------


def step_time(run: Run, device: Device) -> StepTime:
    """Seconds of one optimizer step of the slowest rank.

    The first microbatch goes through all chunks, then the slowest stage is busy with the others (1F1B); with v chunks a
    stage the others wait only a v-th of that (interleaved).

    Raises:
        ConfigError: If the device's peak is not known.
    """
    parallel, m = run.parallel, run.parallel.num_microbatches
    stages = [_microbatch_time(run, rank, device) for rank in range(parallel.pp)]
    slowest = max(stages, key=lambda each: each.total)
    waiting = (sum(each.total for each in stages) - slowest.total) / parallel.num_model_chunks
    fullest = max(range(parallel.pp), key=lambda rank: sum(run.parameters(rank).values()))
    trained, optimizer = run.trained(fullest), run.optimizer_parameters(fullest)
    bandwidth = _MEMORY_SHARE * device.memory_bandwidth
    of_stage = run.dp * parallel.cp * parallel.tp
    reduced = sum(
        6.0 * n * (ranks - 1) / ranks / _link(device, ranks, stride=of_stage // ranks) for ranks, n in trained.items()
    )
    # At best it is beside the last microbatch's backward and the next step's first forward pass.
    exposed = max(_DP_EXPOSED * reduced, reduced - slowest.total)
    return StepTime(
        products=m * slowest.products,
        attention=m * slowest.attention,
        other=m * slowest.other,
        optimizer=(optimizer * _STEP_TRAFFIC + sum(trained.values()) * _GRADIENT_TRAFFIC) / bandwidth,
        communication=m * slowest.communication + exposed,
        bubble=waiting,
        idle=_IDLE + m * slowest.idle,
    )


def _microbatch_time(run: Run, pp_rank: int, device: Device) -> StepTime:
    """Seconds that one stage takes for one microbatch, forward and backward."""
    model, parallel, rows = run.model, run.parallel, run.micro_batch_size
    peak = run.peak_flops_per_s(device)
    if peak is None:
        raise ConfigError(
            f"precision={run.precision}: expected a device whose peak in it is known, got {device.name}; use another"
        )
    layers = run.layers(pp_rank)
    flops = [accounting.layer_flops(model, run.lengths, layer) for layer in layers]
    passes = 3.0 if model.lora is None else 2.0  # frozen weights have no gradients
    products, scores = passes * sum(each[0] for each in flops), 3.5 * sum(each[1] for each in flops)
    repeated = {None: 0.0, "selective": 0.15, "full": 1 / 3}[run.recompute]  # of the time of what is no product
    if run.recompute == "full":
        products, scores = products * (passes + 1) / passes, scores * 4.5 / 3.5
    if pp_rank == parallel.pp - 1:
        products += passes * accounting.head_flops(model, run.lengths, model.padded_vocab_size(parallel.tp))
    rate = _PRODUCTS_SHARE * peak
    for size in (model.hidden_size, run.tokens_of_rank):
        rate *= size / (size + _PRODUCTS_LOSS)
    traffic = _GLUE_TRAFFIC * (1 + repeated) * sum(_layer_bytes(run, layer) for layer in layers)
    shards = parallel.tp * parallel.cp
    traffic += _LOSS_TRAFFIC * _logits(run, pp_rank)
    if model.experts is not None:
        routed = run.bytes_per_number * run.tokens_of_rank * model.experts.topk * model.hidden_size / parallel.tp
        traffic += _EXPERTS_PASSES * routed * sum(model.has_experts(layer) for layer in layers)
    share = _DROPPED_ATTENTION_SHARE * model.kv_channels if model.attention_dropout > 0 else _ATTENTION_SHARE
    if model.architecture == "t5":
        share = _BIASED_ATTENTION_SHARE
    rows_of_hidden = run.bytes_per_number * run.tokens_of_rank / len(run.lengths) * model.hidden_size
    message = rows_of_hidden * (parallel.tp - 1) / parallel.tp
    copies = parallel.tp == 2 and parallel.uses_sequence_parallel and run.recompute != "selective"
    exposed = _TP_COPIES_EXPOSED if copies else _TP_EXPOSED
    sent = 0.0
    if model.experts is not None and parallel.ep > 1:  # to the experts and back, in both passes
        split = parallel.tp if parallel.uses_sequence_parallel else 1
        sent = 4 * _ranks_of_a_token(run) * rows_of_hidden / split * (1 - 1 / parallel.ep)
        sent *= _EXPERTS_WAITS / _link(device, parallel.ep, stride=1)
        sent *= sum(model.has_experts(layer) for layer in layers)
    busy = StepTime(
        products=rows * products / shards / rate,
        attention=rows * scores / shards / (share * peak),
        other=traffic / (_MEMORY_SHARE * device.memory_bandwidth),
        communication=sent
        + len(layers) * exposed * message / _link(device, parallel.tp, stride=1)
        + sum(_exchanged_bytes(run, layer) for layer in layers) / _link(device, parallel.cp, stride=parallel.tp)
        + _INTERLEAVED * parallel.num_model_chunks * (parallel.num_model_chunks > 1),
    )
    launches = sum(_HOST_DECODER if layer >= model.num_layers else 1.0 for layer in layers)
    host = _HOST * launches * (_HOST_TP if parallel.tp > 1 else 1.0) * (1 + repeated)
    return busy if run.cuda_graphs else replace(busy, idle=max(0.0, host - busy.total))


def _exchanged_bytes(run: Run, layer: int) -> float:
    """What a rank receives in the attentions of a layer from the others of its cp group, forward and backward.

    Heads for tokens: queries, keys, values and outputs, and their gradients. Or keys and values of all, and their
    gradients in float32. Nothing of it is hidden.
    """
    model, cp = run.model, run.parallel.cp
    if cp == 1:
        return 0.0
    is_decoder = layer >= model.num_layers
    q, kv = (n * model.kv_channels for n in (model.num_attention_heads, 2 * model.num_query_groups))
    tokens = run.lengths[-1 if is_decoder else 0]
    queries, keys = 2 * q * tokens, kv * tokens
    if is_decoder:  # and from the decoder's queries to the encoder's keys
        queries, keys = 2 * queries, keys + kv * run.lengths[0]
    passes = 3 if run.recompute == "full" else 2
    moved = passes * run.bytes_per_number * (queries + keys) / cp
    if run.parallel.comm_type_of(model) == "all_gather":
        moved = ((passes - 1) * run.bytes_per_number + 4) * keys
    return run.micro_batch_size * moved / run.parallel.tp * (cp - 1) / cp


def _link(device: Device, ranks: int, *, stride: int) -> float:
    """Bytes/s of a rank in a collective of so many ranks, of which neighbours are ``stride`` ranks apart.

    Between hosts each of a group's ranks on a host has its own network adapter, through which one ring in so many goes.
    """
    within = device.link_bandwidth * _LINK_SHARE.get(ranks, 0.66)
    if ranks * stride <= _RANKS_OF_A_HOST:
        return within
    return min(within, 0.66 * device.network_bandwidth * max(1, _RANKS_OF_A_HOST // stride))


# ---- a run that begins ----------------------------------------------------------------------------------------------


def make_run(
    model: ModelConfig, settings: EngineSettings, *, rows: int, lengths: tuple[int, ...], world_size: int
) -> Run:
    """What a run of the Trainer computes.

    Args:
        model: Its shape.
        settings: Of the strategy.
        rows: Of a microbatch; 0 where they are not known, so that activations are left out.
        lengths: Tokens of a row.
        world_size: GPUs.
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
        layout=accounting.chunk_layout(model, settings.parallel, settings.overrides.transformer.get(OVERRIDE)),
    )


# ---- the layouts that fit -------------------------------------------------------------------------------------------

_RESERVED = 0.04
"""Share of a device's memory that a layout leaves for CUDA, NCCL and what falls between two tensors."""
_FEWEST_TOKENS = 4096
"""Of a row on each rank of a cp group: with fewer, splitting rows gains nothing that splitting the batch does not."""
_MAX_MICRO_BATCH_SIZE = 64
_MOVED = 4
"""Layers of each chunk by which the first and last stage may differ from an even share."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with what it is estimated to take."""

    run: Run
    memory: Memory
    time: StepTime

    @property
    def tokens_per_s_per_device(self) -> float:
        """Padding included."""
        return self.run.tokens / self.time.total / self.run.world_size


def plan(run: Run, device: Device) -> Plan:
    """The estimates of one run."""
    return Plan(run=run, memory=memory(run), time=step_time(run, device))


def _seconds(found: Plan) -> float:
    return found.time.total


def plans(run: Run, global_batch_size: int, device: Device) -> list[Plan]:
    """The layouts that fit, the fastest first: for each tp, pp and cp the best of all others, with vpp and without.

    Tensor and context parallelism stay within a host of eight; the former comes with sequence parallelism wherever it
    can, the latter is for rows of 8,192 tokens on.

    Args:
        run: The model, its rows, the precision and the GPUs; all else is what is looked for.
        global_batch_size: Rows of a step over all GPUs.
        device: Of which the GPUs are.

    Raises:
        ConfigError: If none fits; it says what the smallest needs.
    """
    best: dict[tuple[int, int, int, bool], Plan] = {}
    smallest: Plan | None = None
    room = (1 - _RESERVED) * device.memory
    for found in (plan(each, device) for each in _runs(run, global_batch_size)):
        smallest, parallel = min(smallest or found, found, key=lambda each: each.memory.total), found.run.parallel
        if found.memory.total <= room:
            key = parallel.tp, parallel.pp, parallel.cp, parallel.vpp is None
            best[key] = min(best.get(key, found), found, key=_seconds)
    if smallest is None:
        raise ConfigError(
            f"global_batch_size={global_batch_size}: expected one that {run.world_size} GPUs can share by a layout of "
            "this model, got none; choose a multiple of the number of GPUs"
        )
    if not best:
        needed, parallel = smallest.memory.total / (1 - _RESERVED) / GIB, smallest.run.parallel
        how = f"recomputing {smallest.run.recompute or 'nothing'}"
        raise ConfigError(
            f"memory: expected at least {needed:.1f} GiB a GPU (tp={parallel.tp} pp={parallel.pp} cp={parallel.cp}, "
            f"{how}), got {device.memory / GIB:.1f} GiB; use more GPUs or shorter rows"
        )
    return sorted((_balanced(each, device) for each in best.values()), key=_seconds)


def _balanced(even: Plan, device: Device) -> Plan:
    """The same with fewer layers on the stages that have the embedding and the output layer, if that is faster."""
    run, found, parallel = even.run, even, even.run.parallel
    layers, chunks, share = run.model.num_layers, parallel.num_model_chunks, run.model.num_layers // parallel.pp
    if parallel.pp == 1 or run.model.architecture == "t5":
        return even
    for last in range(max(chunks, share - _MOVED * chunks), share, chunks):
        for first in range(last, share + _MOVED * chunks + 1, chunks) if parallel.pp > 2 else (layers - last,):
            ends: dict[str, Any] = dict(zip(UNEVEN_STAGES, (first, last), strict=True))
            uneven = replace(run, parallel=replace(parallel, **ends))
            if _is_allowed(uneven) and (moved := plan(uneven, device)).memory.total <= (1 - _RESERVED) * device.memory:
                found = min(found, moved, key=_seconds)
    return found


def _runs(run: Run, global_batch_size: int) -> Iterator[Run]:
    """Every layout and microbatch that the model and the batch allow."""
    model, lengths = run.model, run.lengths
    most, layers = max(1, min(lengths) // _FEWEST_TOKENS), model.num_layers + model.num_decoder_layers
    within_host = [each for each in divisors(run.world_size) if each <= _RANKS_OF_A_HOST]
    pairs = [(tp, cp) for tp in within_host for cp in within_host if cp <= most and tp * cp in within_host]
    for (tp, cp), pp in ((pair, pp) for pair in pairs for pp in divisors(run.world_size // math.prod(pair))):
        rows, rest = divmod(global_batch_size, dp := run.world_size // (tp * cp * pp))
        eps = divisors(math.gcd(tp * cp * dp, model.experts.num_experts)) if model.experts else [1]
        for size in (each for each in divisors(rows) if each <= _MAX_MICRO_BATCH_SIZE and rest == 0):
            can_interleave = pp > 1 and rows // size % pp == 0
            vpps = (None, *(range(2, layers // pp + 1) if can_interleave else ()))
            for vpp, ep in itertools.product(vpps, (each for each in eps if each <= _RANKS_OF_A_HOST)):
                parallel = ParallelConfig(
                    tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, num_microbatches=rows // size,
                    sequence_parallel=tp > 1 and all(length % (tp * cp) == 0 for length in lengths),
                )  # fmt: skip
                found = replace(run, parallel=parallel, micro_batch_size=size)
                if _is_allowed(found):
                    yield from (found, replace(found, recompute="selective"), replace(found, recompute="full"))


def _is_allowed(run: Run) -> bool:
    try:
        run.parallel.check_model(run.model)
        for length in run.lengths:
            run.parallel.check_sequence(length)
        run.parallel.check_function(run.model, "fit")
    except ConfigError:
        return False
    return True


# ---- the timeline of a pipeline -------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A stage's work on one microbatch in one direction."""

    chunk: int
    """Virtual stage, from 0."""
    microbatch: int
    is_forward: bool
    start: float
    """Seconds from the beginning of the step."""
    seconds: float


def timeline(run: Run, device: Device) -> list[list[Slot]]:
    """When each stage works on which microbatch, by megatron-core's 1F1B or interleaved schedule.

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
                place = chunk * pp + rank  # of the chunk in the whole model
                before = place - 1 if is_forward else place + 1
                needed = (before, microbatch, is_forward)
                if before == pp * chunks:  # the loss: the last chunk turns round
                    needed = (place, microbatch, True)
                if before >= 0 and needed not in ends:
                    break
                free = slots[rank][-1].start + slots[rank][-1].seconds if slots[rank] else 0.0
                start, takes = max(free, ends.get(needed, 0.0)), seconds[rank] * (1 if is_forward else 2) / 3
                slots[rank].append(Slot(chunk, microbatch, is_forward, start, takes))
                ends[place, microbatch, is_forward] = start + takes
    return slots


def _order(parallel: ParallelConfig, pp_rank: int) -> list[tuple[int, int, bool]]:
    """Chunk, microbatch and direction of all that a stage does, as in megatron-core 0.16.1's schedules.py."""
    pp, v, m = parallel.pp, parallel.num_model_chunks, parallel.num_microbatches
    warm_up = _warm_up(parallel, pp_rank)
    forward = [(chunk, first + i) for first in range(0, m, pp) for chunk in range(v) for i in range(min(pp, m - first))]
    backward = [(v - 1 - chunk, microbatch) for chunk, microbatch in forward]
    order = [(*each, True) for each in forward[:warm_up]]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        order += [(*ahead, True), (*behind, False)]
    return order + [(*each, False) for each in backward[max(0, len(forward) - warm_up) :]]


def _warm_up(parallel: ParallelConfig, pp_rank: int) -> int:
    """Forward passes of a stage before its first backward pass follows one, if there are so many microbatches."""
    behind, chunks = parallel.pp - pp_rank - 1, parallel.num_model_chunks
    return behind * 2 + (chunks - 1) * parallel.pp if chunks > 1 else behind
