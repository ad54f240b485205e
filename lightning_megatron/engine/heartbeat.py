"""Heartbeats: notices that a run hangs, says which rank and where, leaves all stacks, and ends its processes.

A rank that sleeps, or waits for a dead disk, stops all others in their next collective, so a run hangs when none of its
ranks makes progress: ranks that wait for one that works (caches, evaluation in a callback) do not end it. Each rank
judges its own progress: a thread looks once a second at the main thread's Python stack, which costs that nothing, and
counts as progress

- what adds to ``progress``: a batch, a microbatch, a new token, a piece of a file that is written,
- a place where the main thread was not seen since then, as in long hooks that do work; a loop without end has
  few places, and is found,
- in set-up, computing time of the process, unless it waits for other ranks: caches, compilers, initial weights.

Another thread tells the store of torch.distributed at which the process groups have met, over a connection of its own,
a ``Beat`` each second. Two threads, since torch's client waits for ever if the rank that serves the store is the one
that was stopped. Rank 0 and some others, spread over the hosts, read what all ranks have told; the first verdict
counts. A rank whose beats end was stopped, or holds Python's lock; of the others the one hangs that does not wait in a
collective. Limits come from the run's own medians.

The threads work while the main thread waits in C, and so do signals here: Python's handlers run in the main thread
only, but the byte that CPython writes to a pipe at once (``signal.set_wakeup_fd``) is read by the thread that looks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import linecache
import math
import os
import re
import signal
import statistics
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_megatron.errors import require_number
from lightning_megatron.restarts import LAUNCHER

MARGIN = timedelta(seconds=10)
"""How much later than ``timeout`` collectives raise: by then the one line of a verdict has taken their place."""
_BEAT = 1.0
_SILENCE = 5.0
"""Seconds without a beat after which a rank counts as silent."""
_SUSPENDED = 10.0
"""Seconds between two looks after which a rank says that it stood still."""
_LEAST, _MEDIANS, _MEDIANS_OF_GRACE = 60.0, 10, 3
_LAST_WORDS = 3.0
"""Seconds that a rank stays for the others to hear the verdict, at their next beat, and to leave their stacks."""
_JUDGES = 8
_LOOKS, _MOST_LOOKS, _STEPS_OF_LOOKS, _LESS_WAITING = 60, 600, 20, 0.5
"""A rank is slow if, seen at least that often in steps, of which the newest count, and over that many of them, it
waited for that much less of its time than others."""


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
_NOBODYS = (
    *(os.sep + os.path.join(name, "") for name in ("torch", "lightning", "lightning_utilities")),
    os.path.join(_OWN, "engine", "cpu.py"),  # around every call of torch
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")
_WAITS = re.compile(r"\.wait\(|run_backward")
_WAITS_FOR_GPU = re.compile(r"\.wait\(|run_backward|\.(item|tolist|cpu|to|copy_)\(|synchronize\(|\b(float|int|bool)\(")


class Place(NamedTuple):
    """Where the main thread of a rank is."""

    text: str
    """In words: "in all_reduce, in Sleeper.on_train_batch_end (train.py:12 in on_train_batch_end)"; the line is of the
    innermost function that is neither Python's nor torch's nor Lightning's."""
    kind: Kind
    is_waiting: bool
    """Whether for other ranks, in a collective or for work that it began."""
    in_user_code: bool
    """Whether Lightning called something that is neither of this package nor of Megatron."""


def place_of(frames: Sequence[FrameType]) -> Place:
    """Where a thread is whose frames are given, the innermost first."""
    codes = [each.f_code for each in frames]
    hook, waits = next(filter(None, map(_hook, frames)), ""), _waits(frames)
    own = next((each for each in frames if _is_told(each.f_code.co_filename)), frames[0])
    file = os.sep.join(own.f_code.co_filename.split(os.sep)[-2:])
    where = ", ".join(f"in {each}" for each in (waits, hook) if each)
    inside = itertools.takewhile(lambda code: _LIGHTNING not in code.co_filename, codes)
    called = [code.co_filename for code in inside if _is_told(code.co_filename)]
    if any(code.co_filename.endswith(_SAVING[0]) and code.co_name in _SAVING[1] for code in codes):
        kind: Kind = "checkpoint"
    elif hook:
        kind = "step" if any(word in hook for word in ("batch", "step", "backward")) else "setup"
    else:
        kind = "step" if any(_LIGHTNINGS_LOOPS in code.co_filename for code in codes) else "setup"
    text = f"{where or 'at'} ({file}:{own.f_lineno} in {own.f_code.co_name})"
    in_user_code = any(_OWN not in each and _MEGATRON not in each for each in called)
    return Place(text, kind, bool(waits), in_user_code)


def _hook(frame: FrameType) -> str:
    """Lightning's hook that a frame calls, with the callback's class if it is one's; empty if it calls none."""
    if not frame.f_code.co_filename.endswith(_LIGHTNINGS_CALLS):
        return ""
    callback = frame.f_locals.get("callback")
    name = str(frame.f_locals.get("hook_name") or frame.f_code.co_name.removeprefix("_call_callbacks_"))
    of_whom = "" if callback is None else f"{type(callback).__name__}."
    return "" if name.startswith("_call_") else of_whom + name


def _is_told(file: str) -> bool:
    is_pythons = file.startswith("<") or (file.startswith(_STDLIB) and "site-packages" not in file)
    return not is_pythons and not any(name in file for name in _NOBODYS)


def _waits(frames: Sequence[FrameType]) -> str:
    """The collective, or another word for what the main thread waits for; empty if for nothing of other ranks."""
    innermost = frames[0].f_code
    if any(each in innermost.co_filename for each in _WAITING):
        inside = itertools.takewhile(lambda each: any(name in each.f_code.co_filename for name in _WAITING), frames)
        return next(name for f in reversed(list(inside)) if (name := f.f_code.co_name) != "wrapper" or f is frames[0])
    line = linecache.getline(innermost.co_filename, frames[0].f_lineno)
    pattern = _WAITS_FOR_GPU if torch.cuda.is_initialized() else _WAITS
    return "a wait for other ranks or the GPU" if pattern.search(line) else ""


# ---- beats -----------------------------------------------------------------------------------------------------------


class Beat(NamedTuple):
    """What a rank tells about itself; the first fields are those of its ``Place``."""

    place: str = ""
    kind: Kind = "setup"
    is_waiting: bool = False
    in_user_code: bool = False
    number: int = 0
    stale: float = 0.0
    """Seconds since it made progress."""
    limit: float = 0.0
    """How many it may take where it is."""
    steps: int = 0
    sampled_steps: int = 0
    """Over how many of them it was looked at; 0 if too seldom to tell."""
    wait_fraction: float = 0.0
    """In which share of these looks it waited for others."""
    busy: str = ""
    """Where it mostly was when it did not wait."""


class Verdict(NamedTuple):
    """That a run hangs; the same on all ranks."""

    text: str
    silent: Sequence[int]
    """Ranks that cannot end by themselves."""
    code: int = 1
    """With which the others end."""


def find_hang(beats: Sequence[Beat], silent: Sequence[int], mine: Beat, most: float) -> Verdict | None:
    """Who hangs; None if some rank makes progress.

    Args:
        beats: The last one of each rank.
        silent: Ranks whose beat has stopped.
        mine: Of the rank that judges.
        most: Seconds that no rank may take, whatever its own limit says.
    """
    awake = {rank: beat for rank, beat in enumerate(beats) if rank not in silent}
    if any(beat.stale < min(beat.limit, most) for beat in awake.values()):
        return None
    hanging = sorted(silent) or [rank for rank, beat in awake.items() if not beat.is_waiting] or _outsiders(awake)
    first = beats[hanging[0]]
    places = Counter(beat.place for beat in awake.values() if beat.place != first.place)
    found = "gives no sign of life (stopped, dead, or in code that holds Python's lock), last" if silent else "is"
    names = f"rank {hanging[0]} hangs" if len(hanging) == 1 else f"ranks {', '.join(map(str, hanging[:8]))} hang"
    others = f", and the others {places.most_common(1)[0][0]}" if places else ""
    return Verdict(
        text=f"{names}: expected progress within {min(mine.limit, most):.0f} s, got none for {mine.stale:.0f} s: rank "
        f"{hanging[0]} {found} {first.place}{others}",
        silent=sorted(silent),
    )


def _outsiders(awake: Mapping[int, Beat]) -> list[int]:
    """All wait for each other: the ranks whose place fewest share; of those as rare, those in the user's own code.

    Of these the ones with the fewest batches: under NCCL the others may be steps ahead before their host waits, too.
    """
    shared = Counter(beat.place for beat in awake.values())
    rarity = {rank: (shared[beat.place], not beat.in_user_code, beat.steps) for rank, beat in awake.items()}
    return [rank for rank in sorted(awake) if rarity[rank] == min(rarity.values())]


def find_straggler(beats: Sequence[Beat]) -> tuple[int, str] | None:
    """Which rank the others nearly always wait for, and a line about it; None if none, or if too little was seen."""
    slowest, beat = min(enumerate(beats), key=lambda each: each[1].wait_fraction)
    others = statistics.median(each.wait_fraction for rank, each in enumerate(beats) if rank != slowest)
    if min(each.sampled_steps for each in beats) < _STEPS_OF_LOOKS or others - beat.wait_fraction < _LESS_WAITING:
        return None
    return slowest, (
        f"rank {slowest} is slower than the others: over the last {beat.sampled_steps} steps they waited for other "
        f"ranks {others:.0%} of the time, and it {beat.wait_fraction:.0%}; mostly it is {beat.busy}"
    )


# ---- the watch -------------------------------------------------------------------------------------------------------

_runs = itertools.count()


class Watch:
    """Watches the thread that starts it, of one rank, until ``stop``; every rank of the world must start one.

    A world of one rank is not watched: nobody waits for it.
    """

    def __init__(self, options: Heartbeat, timeout: timedelta | float) -> None:
        """Nothing is watched yet.

        Args:
            options: The limits.
            timeout: What no limit is more than, perhaps in seconds.

        Raises:
            ConfigError: If ``timeout`` is no number, or below a second.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        require_number("timeout", seconds, at_least=1)
        self.timeout = timedelta(seconds=seconds)
        self.collective_timeout = self.timeout + MARGIN
        """After how long collectives should raise."""
        self._options = options
        self._folder = Path("stacks")
        self._threads: list[threading.Thread] = []

    def prepare(self, root: str, device: torch.device) -> None:
        """Before there is a process group: end the watch of a run before, and have NCCL record its collectives.

        What the user has set for torch's flight recorder stays (torch 2.10 to 2.13). The watch asks for its record;
        torch's own watchdog writes it too, to the same folder, if a collective outlasts its timeout because the watch
        could not end the run.

        Args:
            root: The Trainer's ``default_root_dir``; if that is no folder of this host, stacks go to the current one.
            device: This rank's.
        """
        self.stop()
        self._folder = Path("." if "://" in root else root).absolute() / "stacks"
        if device.type == "cuda":
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            self._folder.mkdir(parents=True, exist_ok=True)  # torch does not make it
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self._folder / "nccl_"))

    def start(self) -> None:
        """Begin to watch; every rank must call."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if self._world_size == 1:
            return
        launcher = int(os.environ.get(LAUNCHER, "0"))
        self._launcher = launcher if launcher == os.getppid() else None
        self._thread = threading.get_ident()
        prefix = f"lightning_megatron/heartbeat/{next(_runs)}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(prefix, store.clone())
        self._names = [f"beat/{rank}" for rank in range(self._world_size)]
        self._is_judge = self._rank % max(1, self._world_size // _JUDGES) == 0
        self._beats: list[Beat] = []
        self._heard: list[float] = []
        """When each rank was last heard to tell something new."""
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None
        self._asked: tuple[float, int] | None = None
        """When a signal asked the run to end, and which."""
        self._answered = self._progressed = self._looked = time.monotonic()
        self._named: set[int] = set()
        """Ranks that were said to be slow."""
        self._ticks, self._computed, self._places = -1, 0.0, set[int]()
        self._stepped: tuple[int, float | None] = (progress.steps, None)
        self._steps: deque[float] = deque(maxlen=101)
        """Seconds of each."""
        self._looks: deque[tuple[int, str]] = deque(maxlen=_MOST_LOOKS)
        """Of those in steps: which step, and where the rank was, "" if it waited for others."""
        self._beat = Beat(limit=self._limit("setup"))
        self._store.set(self._names[self._rank], json.dumps(self._beat))
        self._signals = os.pipe2(os.O_NONBLOCK)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._signals[1], warn_on_full_buffer=False)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._look, self._tell)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The run is over on this rank. Ranks that still wait for it will say that it is gone."""
        if self._threads:
            self._stopped.set()
            for thread in self._threads:
                thread.join(timeout=_BEAT)
            _forget_signals()
            for end in self._signals:
                os.close(end)
            self._threads = []

    # ---- the thread that looks

    def _look(self) -> None:
        while not self._stopped.wait(_BEAT):
            now = time.monotonic()
            if (gap := now - self._looked) > _SUSPENDED:
                self._progressed += gap
                what = f"rank {self._rank} stood still for {gap:.0f} s: it was stopped, or held Python's lock"
                warnings.warn(what, stacklevel=2)
            self._looked = now
            self._sample(now)
            with contextlib.suppress(OSError):
                came = [each for each in os.read(self._signals[0], 4096) if each in (signal.SIGTERM, signal.SIGINT)]
                self._asked = self._asked or next(((now, signum) for signum in came), None)
            if self._verdict is None:
                self._judge(now)
            if self._verdict is not None:
                self._end(self._verdict)
            if self._rank == 0 and self._beats and (slow := find_straggler(self._beats)) and slow[0] not in self._named:
                self._named.add(slow[0])
                warnings.warn(slow[1], stacklevel=2)

    def _sample(self, now: float) -> None:
        """Note where the main thread is, and whether that is progress."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[self._thread])]
        place, steps, computed = place_of(frames), progress.steps, time.process_time()
        ticks, stack = progress.ticks + steps, hash(tuple((id(each.f_code), each.f_lasti) for each in frames))
        computes = place.kind == "setup" and not place.is_waiting and computed - self._computed > _BEAT / 10
        is_debugged = any(each.f_code.co_filename.endswith(_DEBUGGERS) for each in frames)
        if ticks != self._ticks:
            self._places.clear()
        if ticks != self._ticks or computes or is_debugged or stack not in self._places:
            self._progressed = now
        self._places.add(stack)
        self._ticks, self._computed = ticks, computed
        before, since = self._stepped
        if steps != before:
            if since is not None:
                self._steps.append((now - since) / (steps - before))
            self._stepped = (steps, now)
        if place.kind == "step":
            self._looks.append((steps, "" if place.is_waiting else place.text))
        busy = Counter(text for _, text in self._looks if text)
        self._beat = Beat(
            *place,
            number=self._beat.number + 1,
            stale=now - self._progressed,
            limit=self._limit(place.kind),
            steps=steps,
            sampled_steps=steps - self._looks[0][0] if len(self._looks) >= _LOOKS else 0,
            wait_fraction=1 - busy.total() / max(1, len(self._looks)),
            busy=max(busy, key=busy.__getitem__, default=""),
        )

    def _limit(self, kind: Kind) -> float:
        options, is_step = self._options, kind == "step"
        given, seconds = (options.step, self._steps) if is_step else (options.checkpoint, progress.saves)
        if kind == "setup" or not seconds:
            given = options.setup
        elif given is None:
            given = max(_LEAST, _MEDIANS * statistics.median(seconds))
        return min(given, self.timeout.total_seconds())

    def _judge(self, now: float) -> None:
        """Propose a verdict if no rank makes progress."""
        most = math.inf
        is_saved = all(beat.kind == "checkpoint" for beat in (self._beat, *self._beats))
        if self._asked is not None and not is_saved:  # a save that all ranks have come to may go on
            most = max(self._options.grace, _MEDIANS_OF_GRACE * statistics.median(self._steps or [0.0]))
        mine = self._beat
        if mine.stale < min(mine.limit, most):
            return
        found, is_answered = None, now - self._answered <= _SILENCE
        if not is_answered:
            server = "torchrun's agent" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
            told = f"{server} hangs, whose store has not answered for {now - self._answered:.0f} s (stopped or dead)"
            found = Verdict(text=f"{told}: rank {self._rank} waits {mine.place}", silent=[0])
        elif self._beats:
            silent = [rank for rank, heard in enumerate(self._heard) if now - heard > _SILENCE]
            found = find_hang(self._beats, silent, mine, most)
        if found is None:
            return
        code = 1
        more = f"if it only takes long, give MegatronStrategy(heartbeat=Heartbeat({mine.kind}=...)) more seconds"
        if self._asked is not None:
            since, signum = self._asked
            more = f"{signal.Signals(signum).name} came {now - since:.0f} s ago, and the run ends without saving"
            code = 128 + signum
        text = f"{found.text}; last stacks of all ranks: {self._folder}; {more}"
        self._proposal = found._replace(text=text, code=code)
        if not is_answered:
            self._verdict = self._proposal

    def _end(self, found: Verdict) -> None:
        """Say it, leave the stack of this rank, wait for those of others, and end the process."""
        if self._launcher is None or 0 in found.silent:  # else rank 0 says it on the same terminal
            print(f"error: {found.text}", file=sys.stderr, flush=True)
        threading.Thread(target=self._leave_stacks, daemon=True).start()  # the disk may be what hangs
        time.sleep(_LAST_WORDS)  # others ask its store for the verdict, and end with it where it has started them
        if self._launcher is not None and 0 in found.silent:
            os.kill(self._launcher, signal.SIGKILL)  # it was stopped, and nobody waits for this process but it
        os._exit(found.code)

    def _leave_stacks(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank_{self._rank}.txt").open("w") as file:
            told = f"rank {self._rank}: {self._beat.stale:.0f} s without progress {self._beat.place}"
            print(told, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        if dist.get_backend() == "nccl":
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # of builds with NCCL
            (self._folder / f"nccl_{self._rank}").write_bytes(trace)
        sys.stdout.flush()

    # ---- the thread that tells

    def _tell(self) -> None:
        # After the verdict nobody asks: the store may be gone, and torch would print a stack of its own each time.
        while self._verdict is None and not self._stopped.wait(_BEAT):
            with contextlib.suppress(RuntimeError):  # no answer, no connection: the other thread sees to that
                self._exchange()
                self._answered = time.monotonic()

    def _exchange(self) -> None:
        self._store.set(self._names[self._rank], json.dumps(self._beat))
        told = b""
        if self._proposal is not None:
            told = self._store.compare_set("verdict", "", json.dumps(self._proposal))
        elif self._store.check(["verdict"]):
            told = self._store.get("verdict")
        if told:
            self._verdict = Verdict(*json.loads(told))
        if (self._is_judge or self._asked is not None) and self._store.check(self._names):
            now, beats = time.monotonic(), [Beat(*json.loads(told)) for told in self._store.multi_get(self._names)]
            times = zip(beats, self._beats or beats, self._heard or [now] * len(beats), strict=True)
            self._heard = [heard if beat.number == before.number else now for beat, before, heard in times]
            self._beats = beats


def _forget_signals() -> None:
    """Also in workers of DataLoaders, which get SIGTERM at an epoch's end: not a signal to this rank."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
