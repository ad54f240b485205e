"""Verdicts from what all ranks report about themselves: which rank hangs, and which one is slow."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_megatron.run.location import Kind

_MAX_NAMED = 8
"""Ranks that a verdict names, at most."""
_MIN_SAMPLED_STEPS = 20
"""Steps that the samples of each rank must cover before one is called slow."""
_WAIT_GAP = 0.5
"""A rank is slow if it waited for that much less of its time than the others."""


class Beat(NamedTuple):
    """What a rank reports about itself; the first fields are those of its ``Location``."""

    location: str = ""
    kind: Kind = "setup"
    is_waiting: bool = False
    in_user_code: bool = False
    serial: int = 0
    stale: float = 0.0
    """Seconds since its last progress."""
    limit: float = 0.0
    """Seconds without progress that it is allowed where it is."""
    steps: int = 0
    sampled_steps: int = 0
    """Steps that its samples cover; 0 if there are too few samples."""
    wait_fraction: float = 0.0
    """Fraction of the samples in which it waited for other ranks."""
    busy: str = ""
    """Its most frequent location when it did not wait."""


UNHEARD = Beat(location="in its set-up, before its first sign of life", stale=math.inf)
"""Of a rank that was stopped before its first beat."""


class Verdict(NamedTuple):
    """The finding that a run hangs; the same on all ranks."""

    text: str
    silent: Sequence[int]
    """Ranks that cannot end themselves."""
    code: int = 1
    """Exit code of the others."""


def find_hang(
    beats: Sequence[Beat],
    silent: Sequence[int],
    mine: Beat,
    cap: float,
) -> Verdict | None:
    """Find the ranks that hang; None if some rank makes progress.

    Args:
        beats: The last beat of each rank.
        silent: Ranks whose beats have stopped.
        mine: The last beat of the calling rank.
        cap: Upper bound of all limits, in seconds.
    """
    awake = {rank: beat for rank, beat in enumerate(beats) if rank not in silent}
    if any(beat.stale < min(beat.limit, cap) for beat in awake.values()):
        return None
    hanging = sorted(silent)
    state = "gives no sign of life (stopped, dead, or in code that holds the GIL), last"
    if not hanging:
        hanging = [rank for rank, beat in awake.items() if not beat.is_waiting] or _suspects(awake)
        state = "is"
    rank = hanging[0]
    names = f"rank {rank} hangs"
    if len(hanging) > 1:
        names = f"ranks {', '.join(map(str, hanging[:_MAX_NAMED]))} hang"
    location = beats[rank].location
    text = (
        f"{names}: expected progress within {min(mine.limit, cap):.0f} s, got none for {mine.stale:.0f} s: rank {rank} "
        f"{state} {location}"
    )
    elsewhere = Counter(beat.location for beat in awake.values())
    del elsewhere[location]
    if elsewhere:
        text += f", and the others {elsewhere.most_common(1)[0][0]}"
    return Verdict(text=text, silent=sorted(silent))


def _suspects(awake: Mapping[int, Beat]) -> list[int]:
    """Ranks most likely to hang if all wait: those in the rarest location; among equals, those in user code.

    Among these, those with the fewest batches: under NCCL the others may be steps ahead before their hosts wait.
    """
    shared = Counter(beat.location for beat in awake.values())
    rarity = {
        rank: (shared[beat.location], not beat.in_user_code, beat.steps)
        for rank, beat in awake.items()
    }
    rarest = min(rarity.values())
    return [rank for rank in sorted(awake) if rarity[rank] == rarest]


def find_straggler(beats: Sequence[Beat]) -> tuple[int, str] | None:
    """The rank that the others wait for, and a line about it; None if there is none, or too few samples."""
    if min(beat.sampled_steps for beat in beats) < _MIN_SAMPLED_STEPS:
        return None
    waits = [beat.wait_fraction for beat in beats]
    own_wait = min(waits)
    slowest = waits.index(own_wait)
    other_wait = statistics.median(waits[:slowest] + waits[slowest + 1 :])
    if other_wait - own_wait < _WAIT_GAP:
        return None
    beat = beats[slowest]
    return slowest, (
        f"rank {slowest} is slower than the others: over the last {beat.sampled_steps} steps they waited for other "
        f"ranks {other_wait:.0%} of the time, and it {own_wait:.0%}; mostly it is {beat.busy}"
    )
