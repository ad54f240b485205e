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
    return Plan(run=run, memory=memory(run), time=step_time(run, device))


def _seconds(plan: Plan) -> float:
    return plan.time.total


def plans(run: PlannedRun, global_batch_size: int, device: Device) -> list[Plan]:
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


def _candidates(run: PlannedRun, global_batch_size: int) -> Iterator[PlannedRun]:
    """All layouts and microbatch sizes that are valid for the model and the batch."""
    model, lengths = run.model, run.lengths
    max_cp, layers = (
        max(1, min(lengths) // _MIN_TOKENS_PER_CP_RANK),
        model.num_layers + model.num_decoder_layers,
    )
    within_host = [size for size in divisors(run.world_size) if size <= RANKS_PER_HOST]
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
            for vpp, ep in itertools.product(vpps, (n for n in eps if n <= RANKS_PER_HOST)):
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


def _is_valid(run: PlannedRun) -> bool:
    try:
        check_layout(run.model, run.parallel)
        for length in run.lengths:
            run.parallel.check_sequence(length)
        check_function(run.model, run.parallel, "fit")
    except ConfigError:
        return False
    return True
