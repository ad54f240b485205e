"""When each pass of a pipeline stage begins and ends, for the bubble and its drawing."""

from __future__ import annotations

from typing import NamedTuple

from lightning_megatron.planning.devices import Device
from lightning_megatron.planning.pipeline import order_of_passes
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.step_time import microbatch_time


class Slot(NamedTuple):
    """Forward or backward pass of one model chunk for one microbatch."""

    chunk: int
    """Index of the model chunk on its stage, from 0."""
    microbatch: int
    is_forward: bool
    start: float
    """Seconds from the start of the step."""
    seconds: float


def timeline(run: PlannedRun, device: Device) -> list[list[Slot]]:
    """Schedule of each pipeline stage: megatron-core's 1F1B or interleaved schedule.

    A backward pass takes twice as long as a forward pass; the chunks of a stage share its time evenly.
    """
    pp = run.parallel.pp
    chunks = run.parallel.num_model_chunks
    seconds = [microbatch_time(run, rank, device).total / chunks for rank in range(pp)]
    orders = [order_of_passes(run.parallel, rank) for rank in range(pp)]
    ends: dict[tuple[int, int, bool], float] = {}
    slots: list[list[Slot]] = [[] for _ in range(pp)]
    while any(len(slots[rank]) < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            own = slots[rank]
            for chunk, microbatch, is_forward in orders[rank][len(own) :]:
                position = chunk * pp + rank  # of the chunk in the whole model
                previous = position - 1 if is_forward else position + 1
                needed = (previous, microbatch, is_forward)
                if previous == pp * chunks:
                    # The first backward pass follows the last forward pass.
                    needed = (position, microbatch, True)
                if previous >= 0 and needed not in ends:
                    break
                start = ends.get(needed, 0.0)
                if own:
                    start = max(own[-1].start + own[-1].seconds, start)
                duration = seconds[rank] * (1 if is_forward else 2) / 3
                own.append(Slot(chunk, microbatch, is_forward, start, duration))
                ends[position, microbatch, is_forward] = start + duration
    return slots
