"""Heartbeats: where a rank is, what it tells about itself, and which rank a run that hangs waits for.

A rank that sleeps, or waits for a dead disk, stops all others in their next collective, so a run hangs when none of its
ranks makes progress. Each rank judges its own: a thread looks once a second at the main thread's Python stack, which
costs the main thread nothing, and counts as progress

- what adds to ``progress``: a batch, a microbatch, a new token, a piece of a file that is written,
- a place where the main thread was not seen since then, as in long hooks that do work; a loop without end has
  few places, and is found,
- in set-up, computing time of the process, unless it waits for other ranks: caches, compilers, initial weights.

What ranks tell each other (``watch.py``) is a ``Beat`` each. A rank whose beats end was stopped, or holds Python's
lock; of the others the one hangs that does not wait in a collective. Limits come from the run's own medians.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
import statistics
import sysconfig
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Literal

import torch

from lightning_megatron.errors import require_number

_STRAGGLER_SAMPLES, STRAGGLER_STEPS, _STRAGGLER_SHARE = 30, 20, 0.5
"""A rank is slow if, seen that often and over that many steps, it waited for that much less of its time than others."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """After how many seconds without progress of any rank a run counts as hanging.

    Args:
        setup: In hooks that are not of a batch (``setup``, ``on_validation_epoch_end``, ...), and until two steps, or
            saves, have told how long they take. Computing on the host counts as progress there.
        step: In a step of training, validation, test or prediction. None: 60 s, or ten times the median step if that
            is more. No limit is more than ``MegatronStrategy(timeout=)``.
        checkpoint: While training stands still for a checkpoint; each 16 MiB written are progress. None: 60 s, or ten
            times the median if that is more.
        grace: After SIGTERM or SIGINT, on which the ranks save and end as soon as they meet, between two steps: a run
            that makes no progress for so long, and for three median steps at least, ends without saving.

    Raises:
        ConfigError: If a number is below 1.
    """

    setup: float = 600
    step: float | None = None
    checkpoint: float | None = None
    grace: float = 30

    def __post_init__(self) -> None:
        """Check the numbers."""
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                require_number(f"Heartbeat.{each.name}", value, at_least=1)


@dataclass
class Progress:
    """What this process has done; loops that may run for minutes add to it."""

    ticks: int = 0
    """Of anything that takes time."""
    steps: int = 0
    """Batches."""
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=11))
    """Seconds that training stood still for checkpoints."""


progress = Progress()


# ---- where a rank is -------------------------------------------------------------------------------------------------

Kind = Literal["setup", "step", "checkpoint"]

_LIGHTNINGS_CALLS = os.path.join("lightning", "pytorch", "trainer", "call.py")
_LIGHTNINGS_LOOPS = os.path.join("lightning", "pytorch", "loops", "")
_LIGHTNING = os.path.join("lightning", "pytorch", "")
_MEGATRON = os.path.join("megatron", "core", "")
_OWN = os.path.join("lightning_megatron", "")
_SAVING = (os.path.join(_OWN, "checkpointing.py"), ("save", "finish"))
_WAITING = (os.path.join("torch", "distributed", ""), os.path.join(_OWN, "engine", "collectives.py"), "filelock")
_NOBODYS = tuple(os.sep + os.path.join(name, "") for name in ("torch", "lightning", "lightning_utilities"))
_STDLIB = sysconfig.get_paths()["stdlib"]
_EMULATION = os.path.join(_OWN, "engine", "cpu.py")  # around every call of torch
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")
_WAITS = re.compile(r"\.wait\(|run_backward")
_WAITS_FOR_GPU = re.compile(r"\.wait\(|run_backward|\.(item|tolist|cpu|to|copy_)\(|synchronize\(|\b(float|int|bool)\(")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the main thread of a rank is."""

    kind: Kind
    hook: str
    """Lightning's, with the callback's class if it is one's; empty outside of hooks."""
    line: str
    """Of the innermost function that is neither Python's nor torch's nor Lightning's: "train.py:12 in on_fit_start"."""
    waits: str
    """Name of the collective, or another word for what the rank waits for; empty if for nothing of other ranks."""
    is_users: bool
    """Whether Lightning called something that is neither of this package nor of Megatron."""
    stack: int
    """The same for the same place."""
    is_debugged: bool

    def __str__(self) -> str:
        """In words: "in all_reduce, in Sleeper.on_train_batch_end (train.py:12 in on_train_batch_end)"."""
        parts = [f"in {each}" for each in (self.waits, self.hook) if each]
        return f"{', '.join(parts) or 'at'} ({self.line})"


def place_of(innermost: FrameType) -> Place:
    """Where a thread is whose innermost frame is given."""
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [each.f_code.co_filename for each in frames]
    hooks = (_hook(each) for each, file in zip(frames, files, strict=True) if file.endswith(_LIGHTNINGS_CALLS))
    hook = next(filter(None, hooks), "")
    own = next((each for each, file in zip(frames, files, strict=True) if _is_told(file)), frames[0])
    file = own.f_code.co_filename
    inside = itertools.takewhile(lambda each: _LIGHTNING not in each, files)
    return Place(
        kind=_kind(hook, frames),
        hook=hook,
        line=f"{os.sep.join(file.split(os.sep)[-2:])}:{own.f_lineno} in {own.f_code.co_name}",
        waits=_waits(frames),
        is_users=any(_is_told(each) and _OWN not in each and _MEGATRON not in each for each in inside),
        stack=hash(tuple((id(each.f_code), each.f_lasti) for each in frames)),
        is_debugged=any(file.endswith(_DEBUGGERS) for file in files),
    )


def _hook(frame: FrameType) -> str:
    name, callback = frame.f_locals.get("hook_name"), frame.f_locals.get("callback")
    name = name or frame.f_code.co_name.removeprefix("_call_callbacks_")
    if name.startswith("_call_"):
        return ""
    return f"{type(callback).__name__}.{name}" if callback is not None else str(name)


def _kind(hook: str, frames: Sequence[FrameType]) -> Kind:
    codes = [each.f_code for each in frames]
    if any(code.co_filename.endswith(_SAVING[0]) and code.co_name in _SAVING[1] for code in codes):
        return "checkpoint"
    if hook:
        return "step" if "batch" in hook or "step" in hook or "backward" in hook else "setup"
    return "step" if any(_LIGHTNINGS_LOOPS in code.co_filename for code in codes) else "setup"


def _is_told(file: str) -> bool:
    is_pythons = (
        file.startswith("<") or file.endswith(_EMULATION) or (file.startswith(_STDLIB) and "site-packages" not in file)
    )
    return not is_pythons and not any(name in file for name in _NOBODYS)


def _waits(frames: Sequence[FrameType]) -> str:
    """What of other ranks the main thread waits for: in a function of torch.distributed, or for work that it began."""
    innermost = frames[0].f_code
    if any(each in innermost.co_filename for each in _WAITING):
        inside = itertools.takewhile(lambda each: any(name in each.f_code.co_filename for name in _WAITING), frames)
        return next(name for f in reversed(list(inside)) if (name := f.f_code.co_name) != "wrapper" or f is frames[0])
    line = linecache.getline(innermost.co_filename, frames[0].f_lineno)
    pattern = _WAITS_FOR_GPU if torch.cuda.is_initialized() else _WAITS
    return "a wait for other ranks or the GPU" if pattern.search(line) else ""


# ---- beats -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank tells about itself."""

    number: int = 0
    stale: float = 0.0
    """Seconds since it made progress."""
    limit: float = 0.0
    """How many it may take where it is."""
    place: str = ""
    kind: Kind = "setup"
    waits: bool = False
    is_users: bool = False
    samples: int = 0
    """In how many seconds of steps it was looked at, and in how many of them it waited for others."""
    waited: int = 0
    steps: int = 0
    busy: str = ""
    """Where it mostly was when it did not wait."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """That a run hangs; the same on all ranks."""

    text: str
    code: int
    """With which the ranks end."""
    silent: Sequence[int]
    """Ranks that cannot end by themselves."""


def verdict(beats: Mapping[int, Beat], silent: Sequence[int], mine: Beat, most: float) -> Verdict | None:
    """Who hangs; None if some rank makes progress.

    Args:
        beats: The last one of each rank.
        silent: Ranks whose beat has stopped.
        mine: Of the rank that judges.
        most: Seconds that no rank may take, whatever its own limit says.
    """
    awake = {rank: beat for rank, beat in beats.items() if rank not in silent}
    if any(beat.stale < min(beat.limit, most) for beat in awake.values()):
        return None
    hanging = sorted(silent) or [rank for rank, beat in awake.items() if not beat.waits] or _outsiders(awake)
    first = beats[hanging[0]]
    places = Counter(beat.place for beat in awake.values() if beat.place != first.place)
    found = "gives no sign of life (stopped, dead, or in code that holds Python's lock), last" if silent else "is"
    names = f"rank {hanging[0]} hangs" if len(hanging) == 1 else f"ranks {', '.join(map(str, hanging[:8]))} hang"
    others = f", and the others {places.most_common(1)[0][0]}" if places else ""
    return Verdict(
        text=f"{names}: expected progress within {min(mine.limit, most):.0f} s, got none for {mine.stale:.0f} s: rank "
        f"{hanging[0]} {found} {first.place}{others}",
        code=1,
        silent=sorted(silent),
    )


def _outsiders(awake: Mapping[int, Beat]) -> list[int]:
    """All wait for each other: the ranks whose place fewest share; of those as rare, those in the user's own code.

    Of these the ones with the fewest batches: under NCCL the others may be steps ahead before their host waits, too.
    """
    shared = Counter(beat.place for beat in awake.values())
    rarity = {rank: (shared[beat.place], not beat.is_users, beat.steps) for rank, beat in awake.items()}
    return [rank for rank in sorted(awake) if rarity[rank] == min(rarity.values())]


def straggler(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> tuple[int, str] | None:
    """Which rank the others nearly always wait for, and a line about it; None if none, or if too little was seen."""
    waited = {}
    for rank, beat in now.items():
        samples = beat.samples - before[rank].samples
        if samples < _STRAGGLER_SAMPLES or beat.steps - before[rank].steps < STRAGGLER_STEPS:
            return None
        waited[rank] = (beat.waited - before[rank].waited) / samples
    slowest = min(waited, key=lambda rank: waited[rank])
    others = statistics.median([share for rank, share in waited.items() if rank != slowest])
    if others - waited[slowest] < _STRAGGLER_SHARE:
        return None
    return slowest, (
        f"rank {slowest} is slower than the others: over the last {now[slowest].steps - before[slowest].steps} steps "
        f"they waited for other ranks {others:.0%} of the time, and it {waited[slowest]:.0%}; mostly it is "
        f"{now[slowest].busy}"
    )
