"""Order of the passes of a pipeline stage: megatron-core's 1F1B and interleaved schedules."""

from __future__ import annotations

from lightning_megatron.engine.parallel import ParallelConfig


def order_of_passes(parallel: ParallelConfig, pp_rank: int) -> list[tuple[int, int, bool]]:
    """(chunk, microbatch, is_forward) of a stage's passes in order, as in megatron-core 0.16.1's schedules.py."""
    pp = parallel.pp
    v = parallel.num_model_chunks
    m = parallel.num_microbatches
    warm_up = warm_up_passes(parallel, pp_rank)
    forward = []
    for first in range(0, m, pp):
        group = range(first, min(first + pp, m))
        forward += [(chunk, microbatch) for chunk in range(v) for microbatch in group]
    backward = [(v - 1 - chunk, microbatch) for chunk, microbatch in forward]
    order = [(*step, True) for step in forward[:warm_up]]
    for next_forward, next_backward in zip(forward[warm_up:], backward, strict=False):
        order.append((*next_forward, True))
        order.append((*next_backward, False))
    cool_down = backward[max(0, len(forward) - warm_up) :]
    return order + [(*step, False) for step in cool_down]


def warm_up_passes(parallel: ParallelConfig, pp_rank: int) -> int:
    """Number of warm-up forward passes of a stage, before forward and backward passes alternate."""
    later_stages = parallel.pp - pp_rank - 1
    chunks = parallel.num_model_chunks
    if chunks == 1:
        return later_stages
    return later_stages * 2 + (chunks - 1) * parallel.pp
