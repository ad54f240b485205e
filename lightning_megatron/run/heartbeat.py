"""Hang detection by heartbeats: reports which rank hangs and where, dumps all stacks, and ends the processes.

A rank that sleeps, or waits for a dead disk, stops all others in their next collective. So a run hangs when no rank
makes progress: ranks that wait for a working one (caches, evaluation in a callback) do not end it. Each rank measures
its own progress: a thread samples the main thread's Python stack once a second, which costs the main thread nothing,
and counts as progress

- an increment of ``progress``: a batch, a microbatch, a new token, a piece of a file that is written,
- a stack in which the main thread was not seen since then, as in long hooks that do work; an endless loop has few
  distinct stacks, so it is detected,
- in set-up, CPU time of the process, unless it waits for other ranks: caches, compilers, initial weights. An endless
  loop uses CPU time, too, so it counts for ``_MAX_COMPUTING`` times the limit only.

A second thread writes a ``Beat`` each second to torch.distributed's store, over a connection of its own. It is a second
thread because torch's client blocks for ever if the rank that serves the store is the one that was stopped. Rank 0 and
some others, spread over the nodes, read the beats of all ranks; the first verdict counts. A rank whose beats end was
stopped, or holds Python's lock; among the others, the rank that hangs is the one that does not wait in a collective.
Limits are derived from the run's own medians.

The threads run while the main thread waits in C, and signals are noticed then, too: Python's handlers run in the main
thread only, but the sampling thread reads the byte that CPython writes to a pipe at once (``signal.set_wakeup_fd``).
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
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import LARGEST_COUNT, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.run.restarts import LAUNCHER
from lightning_megatron.storage.paths import open_new

MARGIN = timedelta(seconds=10)
"""Added to ``timeout`` for collectives, so that a verdict ends the run before they raise."""
_INTERVAL = 1.0
"""Seconds between samples, and between beats."""
_SILENCE = 5.0
"""Seconds without a beat after which a rank counts as silent."""
_SUSPENDED = 10.0
"""Seconds between two samples after which a rank warns that it stood still."""
_MIN_LIMIT, _LIMIT_MEDIANS, _GRACE_MEDIANS = 60.0, 10, 3
"""Default limits: least seconds, multiple of the median; and the least ``grace``, as a multiple of the median step."""
_MAX_COMPUTING = 6
"""How many limits long CPU time alone counts as progress."""
_EXIT_DELAY = 3.0
"""Seconds from verdict to exit, in which the other ranks read it with their next beat, and all dump their stacks."""
_NUM_READERS = 8
"""About how many ranks read all beats."""
_MIN_SAMPLES, _MAX_SAMPLES, _MIN_SAMPLED_STEPS, _WAIT_GAP = 60, 600, 20, 0.5
"""A rank is slow if it waited for that much less of its time than the others: in the newest samples within steps, of
which there must be that many, over that many steps."""


@checks_options
@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Time limits: seconds without progress on any rank after which a run counts as hanging.

    Args:
        setup: In hooks outside of batches (``setup``, ``on_validation_epoch_end``, ...), and for steps and checkpoints
            until the first has been timed. In these hooks CPU time counts as progress, for six times as long: longer
            than that nothing may compute without a new stack, such as an endless loop.
        step: In a step of training, validation, test or prediction. None: ten times the median step, at least 60 s. No
            limit exceeds ``MegatronStrategy(timeout=)``.
        checkpoint: While training is blocked by a checkpoint; each 16 MiB written count as progress. None: ten times
            the median, at least 60 s.
        grace: After SIGTERM or SIGINT, on which all ranks save and end between two steps: a run without progress for
            this long, and for at least three median steps, ends without saving.

    Raises:
        ConfigError: If a value is below 1.
    """

    setup: float = 600
    step: float | None = None
    checkpoint: float | None = None
    grace: float = 30

    def __post_init__(self) -> None:
        """Check the values."""
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                require_number(f"Heartbeat.{each.name}", value, at_least=1, at_most=LARGEST_COUNT)


# ---- where a rank is -------------------------------------------------------------------------------------------------

Kind = Literal["setup", "step", "checkpoint"]

_LIGHTNING_CALLS = os.path.join("lightning", "pytorch", "trainer", "call.py")
_LIGHTNING_LOOPS = os.path.join("lightning", "pytorch", "loops", "")
_LIGHTNING = os.path.join("lightning", "pytorch", "")
_MEGATRON = os.path.join("megatron", "core", "")
_OWN = os.path.join("lightning_megatron", "")
_SAVING = (os.path.join(_OWN, "run", "checkpointing.py"), ("save", "finish"))
_SAVING_HOOKS = {"on_save_checkpoint", "state_dict"}
"""Hooks from which Lightning collects what it saves."""
_DATA_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WAITING = (
    os.path.join("torch", "distributed", ""),
    os.path.join(_OWN, "engine", "collectives.py"),
    "filelock",
)
_LIBRARIES = (
    *(os.sep + os.path.join(name, "") for name in ("torch", "lightning", "lightning_utilities")),
    os.path.join(_OWN, "engine", "cpu.py"),  # around every call of torch
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")
_WAITS = re.compile(r"\.wait\(|run_backward")
_WAITS_FOR_GPU = re.compile(
    r"\.wait\(|run_backward|\.(item|tolist|cpu|to|copy_)\(|synchronize\(|\b(float|int|bool)\("
)


class Location(NamedTuple):
    """Where the main thread of a rank is."""

    text: str
    """E.g. "in all_reduce, in Sleeper.on_train_batch_end (train.py:12 in on_train_batch_end)"; the line is that of the
    innermost function outside of Python, torch and Lightning."""
    kind: Kind
    is_waiting: bool
    """Whether it waits for other ranks: in a collective, or for work started earlier."""
    in_user_code: bool
    """Whether Lightning called code that belongs neither to this package nor to Megatron."""


def locate(frames: Sequence[FrameType]) -> Location:
    """Location of a thread by its frames, the innermost first."""
    codes = [each.f_code for each in frames]
    hook, waiting = next(filter(None, map(_hook, frames)), ""), _waiting_in(frames)
    own = next((each for each in frames if _is_reported(each.f_code.co_filename)), frames[0])
    file = os.sep.join(own.f_code.co_filename.split(os.sep)[-2:])
    worker = next(filter(None, map(_worker_waited_for, frames)), "")
    where = ", ".join(f"in {each}" for each in (waiting, worker, hook) if each)
    inside = itertools.takewhile(lambda code: _LIGHTNING not in code.co_filename, codes)
    called = [code.co_filename for code in inside if _is_reported(code.co_filename)]
    if any(code.co_filename.endswith(_SAVING[0]) and code.co_name in _SAVING[1] for code in codes):
        kind: Kind = "checkpoint"
    elif hook.rpartition(".")[2] in _SAVING_HOOKS:
        kind = "checkpoint"
    elif hook:
        kind = "step" if any(word in hook for word in ("batch", "step", "backward")) else "setup"
    else:
        kind = "step" if any(_LIGHTNING_LOOPS in code.co_filename for code in codes) else "setup"
    text = f"{where or 'at'} ({file}:{own.f_lineno} in {own.f_code.co_name})"
    in_user_code = any(_OWN not in each and _MEGATRON not in each for each in called)
    return Location(text, kind, bool(waiting), in_user_code)


def _hook(frame: FrameType) -> str:
    """Name of the Lightning hook that a frame calls, with its callback's class if any; empty if it calls none."""
    if not frame.f_code.co_filename.endswith(_LIGHTNING_CALLS):
        return ""
    callback = frame.f_locals.get("callback")
    name = str(
        frame.f_locals.get("hook_name") or frame.f_code.co_name.removeprefix("_call_callbacks_")
    )
    owner = "" if callback is None else f"{type(callback).__name__}."
    return "" if name.startswith("_call_") else owner + name


def _worker_waited_for(frame: FrameType) -> str:
    """The worker process whose batch a frame of torch's DataLoader waits for; empty for any other frame."""
    if frame.f_code.co_name != "_try_get_data" or not frame.f_code.co_filename.endswith(
        _DATA_LOADER
    ):
        return ""
    iterator = frame.f_locals.get("self")
    tasks = getattr(
        iterator, "_task_info", {}
    )  # worker of each batch that was requested (torch 2.10 to 2.13)
    task = tasks.get(getattr(iterator, "_rcvd_idx", None), ())
    if not task:
        return "a wait for a DataLoader's worker"
    process = getattr(iterator, "_workers", {})[task[0]]
    return f"a wait for the DataLoader's worker {task[0]} (process {process.pid})"


def _is_reported(file: str) -> bool:
    is_stdlib = file.startswith("<") or (file.startswith(_STDLIB) and "site-packages" not in file)
    return not is_stdlib and not any(name in file for name in _LIBRARIES)


def _waiting_in(frames: Sequence[FrameType]) -> str:
    """Name of the collective, or a description of the wait, that the thread is in; empty if it waits for no rank."""
    innermost = frames[0].f_code
    if any(each in innermost.co_filename for each in _WAITING):
        inside = itertools.takewhile(
            lambda each: any(name in each.f_code.co_filename for name in _WAITING), frames
        )
        return next(
            name
            for f in reversed(list(inside))
            if (name := f.f_code.co_name) != "wrapper" or f is frames[0]
        )
    line = linecache.getline(innermost.co_filename, frames[0].f_lineno)
    pattern = _WAITS_FOR_GPU if torch.cuda.is_initialized() else _WAITS
    return "a wait for other ranks or the GPU" if pattern.search(line) else ""


# ---- beats -----------------------------------------------------------------------------------------------------------


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


_UNHEARD = Beat(location="in its set-up, before its first sign of life", stale=math.inf)


class Verdict(NamedTuple):
    """The finding that a run hangs; the same on all ranks."""

    text: str
    silent: Sequence[int]
    """Ranks that cannot end themselves."""
    code: int = 1
    """Exit code of the others."""


def find_hang(
    beats: Sequence[Beat], silent: Sequence[int], mine: Beat, cap: float
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
    hanging = (
        sorted(silent)
        or [rank for rank, beat in awake.items() if not beat.is_waiting]
        or _suspects(awake)
    )
    first = beats[hanging[0]]
    elsewhere = Counter(beat.location for beat in awake.values() if beat.location != first.location)
    state = (
        "gives no sign of life (stopped, dead, or in code that holds Python's lock), last"
        if silent
        else "is"
    )
    names = (
        f"rank {hanging[0]} hangs"
        if len(hanging) == 1
        else f"ranks {', '.join(map(str, hanging[:8]))} hang"
    )
    others = f", and the others {elsewhere.most_common(1)[0][0]}" if elsewhere else ""
    return Verdict(
        text=f"{names}: expected progress within {min(mine.limit, cap):.0f} s, got none for {mine.stale:.0f} s: rank "
        f"{hanging[0]} {state} {first.location}{others}",
        silent=sorted(silent),
    )


def _suspects(awake: Mapping[int, Beat]) -> list[int]:
    """Ranks most likely to hang if all wait: those in the rarest location; among equals, those in user code.

    Among these, those with the fewest batches: under NCCL the others may be steps ahead before their hosts wait.
    """
    shared = Counter(beat.location for beat in awake.values())
    rarity = {
        rank: (shared[beat.location], not beat.in_user_code, beat.steps)
        for rank, beat in awake.items()
    }
    return [rank for rank in sorted(awake) if rarity[rank] == min(rarity.values())]


def find_straggler(beats: Sequence[Beat]) -> tuple[int, str] | None:
    """The rank that the others wait for, and a line about it; None if there is none, or too few samples."""
    slowest, beat = min(enumerate(beats), key=lambda each: each[1].wait_fraction)
    others = statistics.median(
        each.wait_fraction for rank, each in enumerate(beats) if rank != slowest
    )
    if (
        min(each.sampled_steps for each in beats) < _MIN_SAMPLED_STEPS
        or others - beat.wait_fraction < _WAIT_GAP
    ):
        return None
    return slowest, (
        f"rank {slowest} is slower than the others: over the last {beat.sampled_steps} steps they waited for other "
        f"ranks {others:.0%} of the time, and it {beat.wait_fraction:.0%}; mostly it is {beat.busy}"
    )


# ---- the watch -------------------------------------------------------------------------------------------------------

_runs = itertools.count()


class Watch:
    """Watches the main thread of a rank from ``start`` to ``stop``; every rank of the world must have one.

    A world of one rank is not watched, since no other rank waits for it.
    """

    def __init__(self, options: Heartbeat | None, timeout: timedelta | float) -> None:
        """Check and store the limits; ``start`` begins to watch.

        Args:
            options: The limits; None to watch nothing.
            timeout: Upper bound of all limits; a number is in seconds.

        Raises:
            ConfigError: If ``timeout`` is not a number, or below one second.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        require_number("timeout", seconds, at_least=1, at_most=LARGEST_COUNT)
        self.timeout = timedelta(seconds=seconds)
        self.collective_timeout = self.timeout + MARGIN
        """Timeout for the process groups."""
        self._is_on = options is not None
        self._options = options or Heartbeat()
        self._folder = Path("stacks")
        self._threads: list[threading.Thread] = []

    def prepare(self, root: str, device: torch.device) -> None:
        """Stop the watch of an earlier run, and have NCCL record its collectives; before any process group exists.

        The user's settings of torch's flight recorder are kept (torch 2.10 to 2.13). The watch dumps its record;
        torch's own watchdog dumps it too, to the same directory, if a collective exceeds its timeout because the watch
        could not end the run.

        Args:
            root: The Trainer's ``default_root_dir``; if it is a URL, stacks go to the current directory.
            device: This rank's device.
        """
        self.stop()
        if not self._is_on:
            return
        self._folder = Path("." if "://" in root else root).absolute() / "stacks"
        if device.type == "cuda":
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            if not self._folder.is_symlink():
                self._folder.mkdir(parents=True, exist_ok=True)  # torch does not create it
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self._folder / "nccl_"))

    def start(self) -> None:
        """Start watching the calling thread; every rank must call."""
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if self._world_size == 1 or not self._is_on:
            return
        launcher = int(os.environ.get(LAUNCHER, "0"))
        self._launcher = launcher if launcher == os.getppid() else None
        self._thread = threading.get_ident()
        prefix = f"lightning_megatron/heartbeat/{next(_runs)}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(prefix, store.clone())
        self._keys = [f"beat/{rank}" for rank in range(self._world_size)]
        self._reads_beats = self._rank % max(1, self._world_size // _NUM_READERS) == 0
        self._beats: list[Beat] = []
        self._heard_at: list[float] = []
        """When each rank's beat last changed."""
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None
        self._end_signal: tuple[float, int] | None = None
        """When the first SIGTERM or SIGINT came, and which of them it was."""
        self._answered_at = self._progress_at = self._shown_at = self._sampled_at = time.monotonic()
        self._saving_since: float | None = None
        """When a sample first saw the save in which the main thread is."""
        self._slow: set[int] = set()
        """Ranks that were reported as slow."""
        self._ticks, self._cpu_time, self._stacks = -1, 0.0, set[int]()
        self._last_step: tuple[int, float | None] = (progress.steps, None)
        self._step_seconds: deque[float] = deque(maxlen=101)
        """Seconds of each of the last steps."""
        self._samples: deque[tuple[int, str]] = deque(maxlen=_MAX_SAMPLES)
        """Of samples within steps: the step, and the location, "" if it waited for other ranks."""
        frames = [frame for frame, _ in traceback.walk_stack(None)]
        self._beat = Beat(*locate(frames), limit=self._limit("setup"))
        self._store.set(self._keys[self._rank], json.dumps(self._beat))
        self._signal_pipe = os.pipe2(os.O_NONBLOCK)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True)
            for run in (self._sample_loop, self._report_loop)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch: the run is over on this rank. Ranks that still wait for it will report it as silent."""
        if self._threads:
            self._stopped.set()
            for thread in self._threads:
                thread.join(timeout=_INTERVAL)
            _reset_wakeup_fd()
            for end in self._signal_pipe:
                os.close(end)
            self._threads = []

    # ---- the sampling thread

    def _sample_loop(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            now = time.monotonic()
            if (gap := now - self._sampled_at) > _SUSPENDED:
                self._progress_at += gap
                self._shown_at += gap
                text = f"rank {self._rank} stood still for {gap:.0f} s: it was stopped, or held Python's lock"
                warnings.warn(text, stacklevel=2)
            self._sampled_at = now
            self._sample(now)
            with contextlib.suppress(OSError):
                received = [
                    n
                    for n in os.read(self._signal_pipe[0], 4096)
                    if n in (signal.SIGTERM, signal.SIGINT)
                ]
                self._end_signal = self._end_signal or next(
                    ((now, signum) for signum in received), None
                )
            if self._verdict is None:
                self._propose_verdict(now)
            if self._verdict is not None:
                self._terminate(self._verdict)
            if (
                self._rank == 0
                and self._beats
                and (slow := find_straggler(self._beats))
                and slow[0] not in self._slow
            ):
                self._slow.add(slow[0])
                warnings.warn(slow[1], stacklevel=2)

    def _sample(self, now: float) -> None:
        """Record where the main thread is, and whether it made progress."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[self._thread])]
        location, steps, cpu_time = locate(frames), progress.steps, time.process_time()
        ticks, stack = (
            progress.ticks + steps,
            hash(tuple((id(each.f_code), each.f_lasti) for each in frames)),
        )
        may_compute = (
            location.kind == "setup"
            and now < self._shown_at + _MAX_COMPUTING * self._limit("setup")
        )
        computes = (
            may_compute and not location.is_waiting and cpu_time - self._cpu_time > _INTERVAL / 10
        )
        is_debugged = any(each.f_code.co_filename.endswith(_DEBUGGERS) for each in frames)
        if ticks != self._ticks:
            self._stacks.clear()
        if ticks != self._ticks or is_debugged or stack not in self._stacks:
            self._shown_at = now
        if computes or self._shown_at == now:
            self._progress_at = now
        self._time_checkpoint(location.kind, now)
        self._stacks.add(stack)
        self._ticks, self._cpu_time = ticks, cpu_time
        before, since = self._last_step
        if steps != before:
            if since is not None:
                self._step_seconds.append((now - since) / (steps - before))
            self._last_step = (steps, now)
        if location.kind == "step":
            self._samples.append((steps, "" if location.is_waiting else location.text))
        busy = Counter(text for _, text in self._samples if text)
        self._beat = Beat(
            *location,
            serial=self._beat.serial + 1,
            stale=now - self._progress_at,
            limit=self._limit(location.kind),
            steps=steps,
            sampled_steps=steps - self._samples[0][0] if len(self._samples) >= _MIN_SAMPLES else 0,
            wait_fraction=1 - busy.total() / max(1, len(self._samples)),
            busy=max(busy, key=busy.__getitem__, default=""),
        )

    def _time_checkpoint(self, kind: Kind, now: float) -> None:
        """Let the time of a save include the hooks before it, which only samples show."""
        if kind == "checkpoint":
            self._saving_since = self._saving_since or now
        elif self._saving_since is not None:
            if progress.saves:
                progress.saves[-1] = max(progress.saves[-1], now - self._saving_since)
            self._saving_since = None

    def _limit(self, kind: Kind) -> float:
        options, is_step = self._options, kind == "step"
        limit, seconds = (
            (options.step, self._step_seconds) if is_step else (options.checkpoint, progress.saves)
        )
        if kind == "setup" or not seconds:
            limit = options.setup
        elif limit is None:
            limit = max(_MIN_LIMIT, _LIMIT_MEDIANS * statistics.median(seconds))
        return min(limit, self.timeout.total_seconds())

    def _propose_verdict(self, now: float) -> None:
        """Propose a verdict if no rank makes progress."""
        cap = math.inf
        is_saving = all(beat.kind == "checkpoint" for beat in (self._beat, *self._beats))
        if (
            self._end_signal is not None and not is_saving
        ):  # a checkpoint that all ranks have begun may be finished
            cap = max(
                self._options.grace, _GRACE_MEDIANS * statistics.median(self._step_seconds or [0.0])
            )
        mine = self._beat
        if mine.stale < min(mine.limit, cap):
            return
        verdict, is_answered = None, now - self._answered_at <= _SILENCE
        if not is_answered:
            server = (
                "torchrun's agent" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
            )
            text = f"{server} hangs, whose store has not answered for {now - self._answered_at:.0f} s (stopped or dead)"
            verdict = Verdict(text=f"{text}: rank {self._rank} waits {mine.location}", silent=[0])
        elif self._beats:
            silent = [rank for rank, heard in enumerate(self._heard_at) if now - heard > _SILENCE]
            verdict = find_hang(self._beats, silent, mine, cap)
        if verdict is None:
            return
        code = 1
        more = f"if it is only slow, raise MegatronStrategy(heartbeat=Heartbeat({mine.kind}=...))"
        if self._end_signal is not None:
            since, signum = self._end_signal
            more = f"{signal.Signals(signum).name} came {now - since:.0f} s ago, and the run ends without saving"
            code = 128 + signum
        text = f"{verdict.text}; last stacks of all ranks: {self._folder}; {more}"
        self._proposal = verdict._replace(text=text, code=code)
        if not is_answered:
            self._verdict = self._proposal

    def _terminate(self, verdict: Verdict) -> None:
        """Print the verdict, dump this rank's stacks, leave time for those of others, and end the process."""
        if (
            self._launcher is None or 0 in verdict.silent
        ):  # otherwise rank 0 prints it on the same terminal
            print(f"error: {verdict.text}", file=sys.stderr, flush=True)
        threading.Thread(
            target=self._dump_stacks, daemon=True
        ).start()  # the disk may be what hangs
        time.sleep(
            _EXIT_DELAY
        )  # others read the verdict from its store, and end with it if it has launched them
        if self._launcher is not None and 0 in verdict.silent:
            os.kill(
                self._launcher, signal.SIGKILL
            )  # it was stopped, and only it waits for this process
        os._exit(verdict.code)

    def _dump_stacks(self) -> None:
        if self._folder.is_symlink():  # planted, perhaps: it is not written through
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with open_new(self._folder / f"rank_{self._rank}.txt") as file:
            header = f"rank {self._rank}: {self._beat.stale:.0f} s without progress {self._beat.location}"
            print(header, file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        if dist.get_backend() == "nccl":
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # only in builds with NCCL
            with open_new(self._folder / f"nccl_{self._rank}", "wb") as file:
                file.write(trace)
        sys.stdout.flush()

    # ---- the reporting thread

    def _report_loop(self) -> None:
        # Not after the verdict: the store may be gone, and torch would print a stack of its own each time.
        while self._verdict is None and not self._stopped.wait(_INTERVAL):
            with contextlib.suppress(
                RuntimeError
            ):  # no answer or no connection: the sampling thread handles it
                self._exchange_beats()
                self._answered_at = time.monotonic()

    def _exchange_beats(self) -> None:
        self._store.set(self._keys[self._rank], json.dumps(self._beat))
        value = b""
        if self._proposal is not None:
            value = self._store.compare_set("verdict", "", json.dumps(self._proposal))
        elif self._store.check(["verdict"]):
            value = self._store.get("verdict")
        if value:
            self._verdict = Verdict(*json.loads(value))
        if self._reads_beats or self._end_signal is not None:
            now, beats = time.monotonic(), self._read_beats()
            changes = zip(
                beats, self._beats or beats, self._heard_at or [now] * len(beats), strict=True
            )
            self._heard_at = [
                heard if beat.serial == before.serial else now for beat, before, heard in changes
            ]
            self._beats = beats

    def _read_beats(self) -> list[Beat]:
        """The last beat of each rank; of one that was stopped before its first, that it has not begun."""
        if self._store.check(self._keys):
            return [Beat(*json.loads(beat)) for beat in self._store.multi_get(self._keys)]
        written = [key for key in self._keys if self._store.check([key])]
        beats = {key: Beat(*json.loads(self._store.get(key))) for key in written}
        return [beats.get(key, _UNHEARD) for key in self._keys]


def _reset_wakeup_fd() -> None:
    """Stop signals from reaching the pipe; also in DataLoader workers, which get SIGTERM when an epoch ends."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)
