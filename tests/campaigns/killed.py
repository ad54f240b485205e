"""Runs whose ranks are killed, or get storms of SIGTERM or SIGINT, while they train, save, validate and generate.

The others have to end by themselves, as under a scheduler that looks after nobody; then the run goes on from what it
has kept, and every loss that it has ever computed must be, to the last bit, that of a run without faults.
"""

from __future__ import annotations

import functools
import random
import signal
import tempfile
from pathlib import Path

from tests.campaigns.attempts import Outcome
from tests.campaigns.faults import LAYOUTS, PHASES, WORLD_SIZE, Fault, losses, run_of, run_to_end

_PATIENCE = 45.0
"""Seconds: what a signal asks for, with a save, may take 30."""


@functools.cache
def expected(layout: str) -> dict[str, set[str]]:
    """The losses of a run without faults."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_to_end(run_of(layout), Path(folder), None, 60)
        if set(ended.codes.values()) != {0}:
            raise SystemExit(f"a run without faults fails: {ended.printed}")
        return losses(Path(folder))


def goes_on(layout: str, folder: Path) -> tuple[str, int]:
    """Whether the run in ``folder`` goes on to its end as if nothing had been; what is lost, and steps compared."""
    ended = run_to_end(run_of(layout), folder, None, 60)
    if ended.codes != dict.fromkeys(range(WORLD_SIZE), 0):
        return f"the run does not go on: codes {ended.codes}, left {ended.left}\n{ended.printed}", 0
    found, whole = losses(folder), expected(layout)
    wrong = sorted(step for step in whole if found.get(step) != whole[step])
    return (f"other losses than without the fault: {', '.join(wrong)}" if wrong else ""), len(whole)


def _attempt(signum: int, most: int, rng: random.Random, folder: Path) -> Outcome:
    layout = rng.choice(list(LAYOUTS))
    fault = Fault(
        phase=rng.choice(list(PHASES)),
        ranks=tuple(rank for rank in range(WORLD_SIZE) if rng.random() < 0.5) or (rng.randrange(WORLD_SIZE),),
        step=rng.randrange(8),
        delay=rng.uniform(0, 0.05),
        signum=signum,
        times=rng.randint(1, most),
    )
    ended = run_to_end(run_of(layout, async_save=rng.random() < 0.5), folder, fault, _PATIENCE)
    if ended.left:
        return Outcome(hung=f"{layout}, {fault}: ranks {ended.left} are still there\n{ended.printed}")
    lost, steps = goes_on(layout, folder)
    if signum == signal.SIGTERM and set(ended.codes.values()) - {143, 0}:
        lost = lost or f"SIGTERM ends with {ended.codes}\n{ended.printed}"
    return Outcome(lost=lost and f"{layout}, {fault}: {lost}", noticed=ended.noticed, steps=steps)


ATTEMPTS = {
    "kill -9": functools.partial(_attempt, signal.SIGKILL, 1),
    "SIGTERM, up to 20 times": functools.partial(_attempt, signal.SIGTERM, 20),
    "SIGINT, up to 20 times": functools.partial(_attempt, signal.SIGINT, 20),
}
