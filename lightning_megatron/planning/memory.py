"""Peak memory of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.engine.host_state import BUCKET_ELEMENTS, num_slots
from lightning_megatron.engine.ops.matrix_shards import ROUND_ELEMENTS
from lightning_megatron.planning.activations import layer_bytes, logits_bytes
from lightning_megatron.planning.pipeline import warm_up_passes
from lightning_megatron.planning.run import Breakdown, PlannedRun


@dataclass(frozen=True, kw_only=True)
class Memory(Breakdown):
    """Bytes of the fullest rank, by use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float


def memory(run: PlannedRun) -> Memory:
    """Peak memory of the fullest rank, without that of CUDA and NCCL themselves."""
    stages = [_stage_memory(run, rank) for rank in range(run.parallel.pp)]
    return max(stages, key=lambda stage: stage.total)


def optimizer_bytes(run: PlannedRun, pp_rank: int) -> float:
    """Bytes of the optimizer's state that a rank of a stage holds, wherever it is."""
    state_bytes = 4.0 * run.num_moments
    if run.bytes_per_element < 4:
        # fp32 master copies.
        state_bytes += 4.0
    # Of matrices Muon has the first moment alone.
    without_moment = 4.0 * run.optimizer_matrices(pp_rank)
    return state_bytes * run.optimizer_parameters(pp_rank) - without_moment


def host_bytes(run: PlannedRun, pp_rank: int) -> float:
    """Bytes of the optimizer's state that a rank of a stage keeps in host memory."""
    return run.offload_optimizer * optimizer_bytes(run, pp_rank)


def _staging_bytes(run: PlannedRun, pp_rank: int) -> float:
    """Bytes of the slots through which the state in host memory passes the device."""
    if not run.offload_optimizer:
        return 0.0
    held = run.optimizer_parameters(pp_rank)
    matrices = run.optimizer_matrices(pp_rank)
    slot = 4.0 * (run.num_moments + 1) * min(BUCKET_ELEMENTS, held - matrices)
    # A round of Muon has at most one matrix more than these.
    slot = max(slot, 8.0 * min(ROUND_ELEMENTS, matrices))
    return num_slots(slot) * slot


def _stage_memory(run: PlannedRun, pp_rank: int) -> Memory:
    optimizer = optimizer_bytes(run, pp_rank) - host_bytes(run, pp_rank)
    optimizer += _staging_bytes(run, pp_rank)
    if run.ema:
        optimizer += 4.0 * run.optimizer_parameters(pp_rank)
    weights = sum(run.parameters(pp_rank).values()) + sum(run.adapters.values())
    return Memory(
        weights=run.bytes_per_element * weights,
        gradients=4.0 * sum(run.trained(pp_rank).values()),
        optimizer=optimizer,
        activations=_activation_bytes(run, pp_rank),
        logits=logits_bytes(run, pp_rank),
    )


def _activation_bytes(run: PlannedRun, pp_rank: int) -> float:
    """Bytes of activations on a stage when most microbatches are in flight."""
    parallel = run.parallel
    layers = run.layers(pp_rank)
    chunks = parallel.num_model_chunks
    passes = min(warm_up_passes(parallel, pp_rank) + 1, parallel.num_microbatches * chunks)
    in_flight = passes / chunks
    is_selective = run.recompute == "selective"
    kept = sum(layer_bytes(run, layer, recompute=is_selective) for layer in layers)
    if run.recompute != "full":
        return in_flight * kept
    # Layers are recomputed one at a time, after the logits have been freed.
    inputs = run.bytes_per_element * run.tokens_per_rank * run.model.hidden_size * len(layers)
    if parallel.uses_sequence_parallel:
        in_flight /= parallel.tp
    inputs *= in_flight
    recomputed = kept / len(layers) - logits_bytes(run, pp_rank)
    return inputs + max(0.0, recomputed)
