"""Time of an optimizer step.

It is the sum of matrix products (at the rate that the power limit allows, below the datasheet's), attention, memory
traffic of all other operations, exposed communication, and the pipeline bubble (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2). The constants, here and for memory, were fitted on some runs on H200s
and tested on others, all in ``tests/unit/test_planner.py``: peak memory is within 10 %, step time within 15 %. The runs
on several GPUs, and some on one, were measured before kernels were fused around matrix products and in the optimizer;
the constants are a compromise between old and new runs.

Other devices are scaled from an H200 by datasheet: matrix products and attention by peak bf16 FLOP/s, the rest by
memory and link bandwidth. A host has eight GPUs. Speeds between hosts are from datasheets and were not measured;
pipeline communication between stages is assumed to overlap with computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.layout import comm_type_of
from lightning_megatron.planning.activations import layer_bytes, num_logits, ranks_per_token
from lightning_megatron.planning.devices import RANKS_PER_HOST, Device, peak_flops_per_s
from lightning_megatron.planning.flops import head_flops, layer_flops
from lightning_megatron.planning.matrices import layer_matrices
from lightning_megatron.planning.memory import host_bytes
from lightning_megatron.planning.parameters import active_adapter_parameters
from lightning_megatron.planning.run import Breakdown, PlannedRun

_PRODUCTS_SHARE = 0.692
"""Share of the datasheet's peak that matrix products reach under the power limit, before ``_PRODUCTS_LOSS``."""
_PRODUCTS_LOSS = 100
"""Matrix products reach n / (n + this) of the rate, for n = hidden size, and again for n = tokens of a microbatch."""
_ATTENTION_SHARE = 0.47
"""Share of the peak that attention reaches."""
_DROPPED_ATTENTION_SHARE = 0.0031
"""The same with dropout (FlashAttention-2), per channel of a head."""
_BIASED_ATTENTION_SHARE = 0.07
"""The same for a T5, whose relative position bias has gradients."""
_OTHER_TRAFFIC = 4.0
"""Bytes moved by norms, activations, residuals and rotary embeddings, forward and backward, per activation byte."""
_EXPERTS_TRAFFIC = 33
"""Passes over the inputs of experts, forward and backward, including sorting, summation and the inefficiency of small
products."""
_EXPERTS_SLOWDOWN = 4
"""Slowdown of all-to-alls by uneven splits, including synchronization with the host."""
_LOSS_TRAFFIC = 11.0
"""Bytes moved per logit of the cross-entropy, gradient included."""
_STEP_TRAFFIC = 34.0
"""Bytes moved per parameter by the optimizer."""
_MUON_TRAFFIC = 60.0
"""Bytes moved per parameter by Muon, without the matrix products: counted, not measured."""
_MUON_ITERATIONS = 5
_GRADIENT_TRAFFIC = 12.0
"""Bytes moved per parameter by zeroing and accumulating gradients."""
_MEMORY_SHARE = 0.89
"""Achieved share of the bandwidth of device memory."""
_LINK_SHARE = {2: 0.48}
"""Achieved share of the bandwidth of links, by group size."""
_OTHER_LINK_SHARE = 0.66
"""The same for group sizes that are not listed."""
_TP_EXPOSED = 8
"""Exposed collectives of a layer (of 10, forward and backward) with NCCL."""
_TP_COPIES_EXPOSED = 1.5
"""The same as peer copies between two GPUs."""
_DP_EXPOSED = 0.25
"""Share of the gradient reduction that compute does not hide."""
_HOST_SHARE = 0.8
"""Achieved share of the bandwidth to host memory with copies in both directions at once: 52 of 64 GB/s on an H200."""
_IDLE = 0.014
"""Seconds per step in which the device is idle: Trainer, data, first and last kernel launches."""
_INTERLEAVED = 0.7e-3
"""Seconds per microbatch and model chunk of an interleaved schedule: exposed communication, and Python."""
_HOST = 3.0e-3
"""Seconds that Python takes to launch the kernels of a layer and microbatch, forward and backward: a lower bound of its
time."""
_HOST_DECODER = 1.6
"""Factor for a decoder layer with cross-attention."""
_HOST_TP = 1.3
"""Factor for tensor-parallel collectives."""


@dataclass(frozen=True, kw_only=True)
class StepTime(Breakdown):
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


def step_time(run: PlannedRun, device: Device) -> StepTime:
    """Seconds of one optimizer step on the slowest rank.

    The bubble is the time of one microbatch on all other stages (1F1B), divided by the number of model chunks per stage
    (interleaved).

    Raises:
        ConfigError: If the device's peak is unknown.
    """
    parallel = run.parallel
    m = parallel.num_microbatches
    ranks = range(parallel.pp)
    stages = [microbatch_time(run, rank, device) for rank in ranks]
    slowest = max(stages, key=lambda stage: stage.total)
    others = sum(stage.total for stage in stages) - slowest.total
    sizes = [sum(run.parameters(rank).values()) for rank in ranks]
    fullest = sizes.index(max(sizes))
    trained = run.trained(fullest)
    matrices = run.optimizer_matrices(fullest)
    updated = run.optimizer_parameters(fullest) * _STEP_TRAFFIC
    updated += matrices * (_MUON_TRAFFIC - _STEP_TRAFFIC)
    accumulated = sum(trained.values()) * _GRADIENT_TRAFFIC
    orthogonalization = _orthogonalization_seconds(run, fullest, device)
    device_bandwidth = _MEMORY_SHARE * device.memory_bandwidth
    update = updated / device_bandwidth + orthogonalization
    # State in host memory is updated while other state is copied, which takes longer unless Muon computes.
    copied = host_bytes(run, fullest) / (_HOST_SHARE * device.host_bandwidth)
    offloaded = run.offload_optimizer * update
    update += max(0.0, copied - offloaded)
    reduced = _reduction_seconds(run, trained, device)
    # It overlaps at most with the last backward pass, and with the first forward pass of the next step.
    exposed = max(_DP_EXPOSED * reduced, reduced - slowest.total)
    return StepTime(
        products=m * slowest.products,
        attention=m * slowest.attention,
        other=m * slowest.other,
        optimizer=accumulated / device_bandwidth + update,
        communication=m * slowest.communication + exposed,
        bubble=others / parallel.num_model_chunks,
        idle=_IDLE + m * slowest.idle,
    )


def _orthogonalization_seconds(run: PlannedRun, pp_rank: int, device: Device) -> float:
    """Seconds of Muon's matrix products, which are shared out evenly."""
    if not run.uses_muon:
        return 0.0
    parallel = run.parallel
    ranks_of_a_stage = run.dp * parallel.cp * parallel.tp
    flops = 0.0
    for layer in run.layers(pp_rank):
        for shape in layer_matrices(run.model, layer):
            ranks = ranks_of_a_stage
            if not run.distributed_optimizer:
                ranks = {"tp": parallel.tp, "ep": parallel.ep, None: parallel.tp}[shape.spread_over]
            flops += _MUON_ITERATIONS * shape.iteration_flops / ranks
    peak = peak_flops_per_s(device.name, "bf16")
    assert peak is not None, "every device of the planner has bf16"
    return flops / (_PRODUCTS_SHARE * peak)


def _reduction_seconds(
    run: PlannedRun,
    trained: Mapping[int, float],
    device: Device,
) -> float:
    """Seconds in which gradients are reduced and updated weights gathered over the replicas."""
    ranks_of_a_stage = run.dp * run.parallel.cp * run.parallel.tp
    seconds = 0.0
    for ranks, count in trained.items():
        link = _link(device, ranks, stride=ranks_of_a_stage // ranks)
        seconds += 6.0 * count * (ranks - 1) / ranks / link
    return seconds


def microbatch_time(run: PlannedRun, pp_rank: int, device: Device) -> StepTime:
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


def _flops_of_a_row(
    run: PlannedRun,
    pp_rank: int,
    layers: Sequence[int],
) -> tuple[float, float]:
    """FLOPs of matrix products and of attention scores that one row takes in a stage, forward and backward."""
    model = run.model
    flops = [layer_flops(model, run.lengths, layer) for layer in layers]
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
        products += passes * head_flops(model, run.lengths, vocab_size)
    products += 6.0 * active_adapter_parameters(model) * run.lengths[-1] / run.parallel.pp
    return products, scores


def _attention_share(run: PlannedRun) -> float:
    """Share of the device's peak that attention reaches."""
    model = run.model
    if model.architecture == "t5":
        return _BIASED_ATTENTION_SHARE
    if model.attention_dropout > 0:
        return _DROPPED_ATTENTION_SHARE * model.kv_channels
    return _ATTENTION_SHARE


def _repeated_share(run: PlannedRun) -> float:
    """Share of the time outside of matrix products that recomputation repeats."""
    shares = {None: 0.0, "selective": 0.15, "full": 1 / 3}
    return shares[run.recompute]


def _other_traffic(
    run: PlannedRun,
    pp_rank: int,
    layers: Sequence[int],
) -> float:
    """Bytes that a stage moves in device memory outside of matrix products and attention."""
    model = run.model
    activations = sum(layer_bytes(run, layer) for layer in layers)
    traffic = _OTHER_TRAFFIC * (1 + _repeated_share(run)) * activations
    traffic += _LOSS_TRAFFIC * num_logits(run, pp_rank)
    if model.experts is not None:
        routed_rows = run.tokens_per_rank * model.experts.topk
        routed = run.bytes_per_element * routed_rows * model.hidden_size / run.parallel.tp
        layers_with_experts = sum(model.has_experts(layer) for layer in layers)
        traffic += _EXPERTS_TRAFFIC * routed * layers_with_experts
    return traffic


def _exposed_communication(
    run: PlannedRun,
    layers: Sequence[int],
    device: Device,
) -> float:
    """Seconds of communication that no computation hides."""
    parallel = run.parallel
    tokens = run.bytes_per_element * run.tokens_per_rank / len(run.lengths)
    hidden_bytes = tokens * run.model.hidden_size
    message = hidden_bytes * (parallel.tp - 1) / parallel.tp
    uses_copies = parallel.tp == 2 and parallel.uses_sequence_parallel
    exposed: float = _TP_EXPOSED
    if uses_copies and run.recompute != "selective":
        exposed = _TP_COPIES_EXPOSED
    tp_link = _link(device, parallel.tp, stride=1)
    cp_link = _link(device, parallel.cp, stride=parallel.tp)
    exchanged = sum(_exchanged_bytes(run, layer) for layer in layers)
    seconds = _dispatch_seconds(run, layers, hidden_bytes, device)
    seconds += len(layers) * exposed * message / tp_link
    seconds += exchanged / cp_link
    if parallel.num_model_chunks > 1:
        seconds += _INTERLEAVED * parallel.num_model_chunks
    return seconds


def _dispatch_seconds(
    run: PlannedRun,
    layers: Sequence[int],
    hidden_bytes: float,
    device: Device,
) -> float:
    """Seconds in which experts get their rows and return them, in both passes."""
    model = run.model
    parallel = run.parallel
    if model.experts is None or parallel.ep == 1:
        return 0.0
    dispatch = 4 * ranks_per_token(run) * hidden_bytes
    if parallel.uses_sequence_parallel:
        dispatch /= parallel.tp
    dispatch *= 1 - 1 / parallel.ep
    dispatch *= _EXPERTS_SLOWDOWN / _link(device, parallel.ep, stride=1)
    return dispatch * sum(model.has_experts(layer) for layer in layers)


def _host_seconds(run: PlannedRun, layers: Sequence[int]) -> float:
    """Seconds that Python takes to launch the kernels of a microbatch."""
    launches = 0.0
    for layer in layers:
        is_decoder = layer >= run.model.num_layers
        launches += _HOST_DECODER if is_decoder else 1.0
    seconds = _HOST * launches
    if run.parallel.tp > 1:
        seconds *= _HOST_TP
    return seconds * (1 + _repeated_share(run))


def _exchanged_bytes(run: PlannedRun, layer: int) -> float:
    """Bytes that a rank receives over the cp group in the attentions of a layer, forward and backward; all exposed.

    With all-to-all: queries, keys, values, outputs and their gradients. With all-gather: keys and values of all tokens,
    and their gradients in float32.
    """
    model = run.model
    cp = run.parallel.cp
    if cp == 1:
        return 0.0
    is_decoder = layer >= model.num_layers
    tokens = run.lengths[-1] if is_decoder else run.lengths[0]
    widths = model.kv_channels + model.value_width
    kv = model.num_query_groups * widths
    queries = model.num_attention_heads * widths * tokens
    keys = kv * tokens
    if is_decoder:
        # And cross-attention.
        queries *= 2
        keys += kv * run.lengths[0]
    passes = 3 if run.recompute == "full" else 2
    moved = passes * run.bytes_per_element * (queries + keys) / cp
    if comm_type_of(model, run.parallel) == "all_gather":
        moved = ((passes - 1) * run.bytes_per_element + 4) * keys
    return run.micro_batch_size * moved / run.parallel.tp * (cp - 1) / cp


def _link(device: Device, ranks: int, *, stride: int) -> float:
    """Bytes/s per rank in a collective over a group of ``ranks`` that are ``stride`` apart.

    Between hosts the group's ranks on a host each have a network adapter, and the rings are spread over these.
    """
    within = device.link_bandwidth * _LINK_SHARE.get(ranks, _OTHER_LINK_SHARE)
    if ranks * stride <= RANKS_PER_HOST:
        return within
    adapters = max(1, RANKS_PER_HOST // stride)
    return min(within, _OTHER_LINK_SHARE * device.network_bandwidth * adapters)
