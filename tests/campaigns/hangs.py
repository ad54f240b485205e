"""Runs one rank of which hangs: it sleeps, loops, was stopped, waits for a disk or in a collective of its own.

All ranks have to end with a line that names it; then the run goes on as if nothing had been.
"""

from __future__ import annotations

import functools
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.attempts import Outcome
from tests.campaigns.faults import LAYOUTS, PHASES, WORLD_SIZE, Fault, run_of, run_to_end, sleep
from tests.campaigns.killed import goes_on

SETUP, STEP = 9.0, 6.0
"""Limits of these runs in seconds: for hooks like ``on_validation_start``, and for all else."""
_PATIENCE = SETUP + 15


def loop() -> None:
    while True:
        time.sleep(0)


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def dead_disk() -> None:
    """Every write of this rank waits for ever, in the threads that write."""
    from lightning_megatron.checkpoint.save import _ChecksummedFile

    _ChecksummedFile.write = lambda self, data: sleep() or 0  # type: ignore[method-assign, func-returns-value]


def _attempt(hang: Callable[[], None] | None, phases: tuple[str, ...], rng: random.Random, folder: Path) -> Outcome:
    from lightning_megatron.engine.heartbeat import Heartbeat

    layout, rank = rng.choice(list(LAYOUTS)), rng.randrange(WORLD_SIZE)
    fault = Fault(
        phase=rng.choice(phases),
        ranks=(rank,),
        step=2 + rng.randrange(6),
        delay=rng.uniform(0, 0.05),
        signum=signal.SIGSTOP,
        hang=hang,
    )
    heartbeat = Heartbeat(setup=SETUP, step=STEP, checkpoint=STEP)
    ended = run_to_end(run_of(layout, heartbeat=heartbeat), folder, fault, _PATIENCE, () if hang else (rank,))
    told = f"{layout}, {fault}: "
    if ended.left:
        return Outcome(hung=f"{told}ranks {ended.left} are still there\n{ended.printed}")
    lines = re.findall(r"^error: .*", ended.printed, re.MULTILINE)
    if not lines or any(not line.startswith(f"error: rank {rank} hangs") for line in lines):
        return Outcome(lost=f"{told}rank {rank} is not named in {lines}\n{ended.printed}")
    stacks = folder / "stacks" / f"rank_{rank}.txt"
    if hang is not None and hang is not dead_disk and hang.__name__ not in stacks.read_text():
        return Outcome(lost=f"{told}{stacks} does not show where it hangs")
    lost, steps = goes_on(layout, folder)
    print(f"{told}{ended.noticed:.1f} s: {lines[0]}", flush=True)
    return Outcome(lost=lost and told + lost, noticed=ended.noticed, steps=steps)


_ANY = tuple(PHASES)
ATTEMPTS = {
    "SIGSTOP": functools.partial(_attempt, None, _ANY),
    "sleeps in a hook": functools.partial(_attempt, sleep, _ANY),
    "loops in a hook": functools.partial(_attempt, loop, ("training", "validating")),
    "a barrier of its own": functools.partial(_attempt, barrier, ("training", "validating")),
    "a dead disk": functools.partial(_attempt, dead_disk, ("saving",)),
}
