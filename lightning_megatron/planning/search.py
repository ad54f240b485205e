"""Search for the layouts that fit, fastest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig
from lightning_megatron.errors import ConfigError, divisors
from lightning_megatron.models.layout import check_function, check_layout
from lightning_megatron.planning.devices import GIB, RANKS_PER_HOST, Device
from lightning_megatron.planning.memory import Memory, memory
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.step_time import StepTime, step_time

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

    run: PlannedRun
    memory: Memory
    time: StepTime

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput per GPU, padding included."""
        return self.run.tokens / self.time.total / self.run.world_size


def plan(run: PlannedRun, device: Device) -> Plan:
    """Estimate memory and step time of a run."""
    return Plan(
        run=run,
        memory=memory(run),
        time=step_time(run, device),
    )


def _seconds(plan: Plan) -> float:
    return plan.time.total


def _fits(plan: Plan, device: Device) -> bool:
    return plan.memory.total <= (1 - _RESERVED) * device.memory


def plans(
    run: PlannedRun,
    global_batch_size: int,
    device: Device,
) -> list[Plan]:
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
    for layout in _candidates(run, global_batch_size):
        candidate = plan(layout, device)
        if smallest is None or candidate.memory.total < smallest.memory.total:
            smallest = candidate
        if not _fits(candidate, device):
            continue
        parallel = layout.parallel
        key = (parallel.tp, parallel.pp, parallel.cp, parallel.vpp is None)
        if key not in best or _seconds(candidate) < _seconds(best[key]):
            best[key] = candidate
    if smallest is None:
        raise ConfigError(
            f"global_batch_size={global_batch_size}: expected one that {run.world_size} GPUs can share in a layout of "
            "this model, got none; choose a multiple of the number of GPUs"
        )
    if not best:
        needed = smallest.memory.total / (1 - _RESERVED) / GIB
        parallel = smallest.run.parallel
        raise ConfigError(
            f"memory: expected at least {needed:.1f} GiB a GPU (tp={parallel.tp} pp={parallel.pp} cp={parallel.cp}, "
            f"recompute={smallest.run.recompute}), got {device.memory / GIB:.1f} GiB; use more GPUs or shorter rows"
        )
    balanced = [_balance(even, device) for even in best.values()]
    return sorted(balanced, key=_seconds)


def _balance(even: Plan, device: Device) -> Plan:
    """Give the stages with the embedding and the output layer fewer layers, if that is faster."""
    run = even.run
    parallel = run.parallel
    if parallel.pp == 1 or run.model.architecture == "t5":
        return even
    best = even
    for first, last in _uneven_ends(run):
        ends: Any = dict(zip(UNEVEN_STAGES, (first, last), strict=True))
        uneven = replace(run, parallel=replace(parallel, **ends))
        if not _is_valid(uneven):
            continue
        other = plan(uneven, device)
        if _fits(other, device) and _seconds(other) < _seconds(best):
            best = other
    return best


def _uneven_ends(run: PlannedRun) -> Iterator[tuple[int, int]]:
    """Numbers of layers of the first and the last stage to try."""
    parallel = run.parallel
    chunks = parallel.num_model_chunks
    share = run.model.num_layers // parallel.pp
    least = max(chunks, share - _MAX_UNEVENNESS * chunks)
    most = share + _MAX_UNEVENNESS * chunks
    for last in range(least, share, chunks):
        if parallel.pp == 2:
            yield run.model.num_layers - last, last
            continue
        for first in range(last, most + 1, chunks):
            yield first, last


def _candidates(run: PlannedRun, global_batch_size: int) -> Iterator[PlannedRun]:
    """All layouts and microbatch sizes that are valid for the model and the batch."""
    for tp, cp, pp in _splits(run):
        dp = run.world_size // (tp * cp * pp)
        rows, rest = divmod(global_batch_size, dp)
        if rest:
            continue
        can_split_sequence = all(length % (tp * cp) == 0 for length in run.lengths)
        for size in divisors(rows):
            if size > _MAX_MICRO_BATCH_SIZE:
                continue
            num_microbatches = rows // size
            vpps = _virtual_stages(run, pp, num_microbatches)
            for vpp, ep in itertools.product(vpps, _expert_splits(run, tp * cp * dp)):
                parallel = ParallelConfig(
                    tp=tp,
                    pp=pp,
                    vpp=vpp,
                    cp=cp,
                    ep=ep,
                    num_microbatches=num_microbatches,
                    sequence_parallel=tp > 1 and can_split_sequence,
                )
                valid = replace(run, parallel=parallel, micro_batch_size=size)
                if _is_valid(valid):
                    yield valid
                    yield replace(valid, recompute="selective")
                    yield replace(valid, recompute="full")


def _splits(run: PlannedRun) -> Iterator[tuple[int, int, int]]:
    """Sizes of tp, cp and pp."""
    max_cp = max(1, min(run.lengths) // _MIN_TOKENS_PER_CP_RANK)
    within_host = [size for size in divisors(run.world_size) if size <= RANKS_PER_HOST]
    for tp, cp in itertools.product(within_host, within_host):
        if cp > max_cp or tp * cp not in within_host:
            continue
        for pp in divisors(run.world_size // (tp * cp)):
            yield tp, cp, pp


def _virtual_stages(
    run: PlannedRun,
    pp: int,
    num_microbatches: int,
) -> list[int | None]:
    """Sizes of vpp: None, and those of an interleaved schedule if there can be one."""
    if pp == 1 or num_microbatches % pp != 0:
        return [None]
    layers = run.model.num_layers + run.model.num_decoder_layers
    return [None, *range(2, layers // pp + 1)]


def _expert_splits(run: PlannedRun, ranks_of_a_stage: int) -> list[int]:
    """Sizes of ep."""
    if run.model.experts is None:
        return [1]
    shared = math.gcd(ranks_of_a_stage, run.model.experts.num_experts)
    return [size for size in divisors(shared) if size <= RANKS_PER_HOST]


def _is_valid(run: PlannedRun) -> bool:
    try:
        check_layout(run.model, run.parallel)
        for length in run.lengths:
            run.parallel.check_sequence(length)
        check_function(run.model, run.parallel, "fit")
    except ConfigError:
        return False
    return True
