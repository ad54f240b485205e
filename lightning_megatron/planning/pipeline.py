"""Order of the passes of a pipeline stage: megatron-core's 1F1B and interleaved schedules."""

from __future__ import annotations

from lightning_megatron.engine.parallel import ParallelConfig


def order_of_passes(parallel: ParallelConfig, pp_rank: int) -> list[tuple[int, int, bool]]:
    """(chunk, microbatch, is_forward) of a stage's passes in order, as in megatron-core 0.16.1's schedules.py."""
    pp, v, m = parallel.pp, parallel.num_model_chunks, parallel.num_microbatches
    warm_up = warm_up_passes(parallel, pp_rank)
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


def warm_up_passes(parallel: ParallelConfig, pp_rank: int) -> int:
    """Number of warm-up forward passes of a stage, before forward and backward passes alternate."""
    later_stages, chunks = parallel.pp - pp_rank - 1, parallel.num_model_chunks
    return later_stages * 2 + (chunks - 1) * parallel.pp if chunks > 1 else later_stages
