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
stopped, or holds the GIL; among the others, the rank that hangs is the one that does not wait in a collective.
Limits are derived from the run's own medians.

The threads run while the main thread waits in C, and signals are noticed then, too: Python's handlers run in the main
thread only, but the sampling thread reads the byte that CPython writes to a pipe at once (``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import LARGEST_COUNT, ConfigError, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.run.hangs import UNHEARD, Beat, Verdict, find_hang, find_straggler
from lightning_megatron.run.location import Kind, locate
from lightning_megatron.run.restarts import LAUNCHER
from lightning_megatron.storage.paths import open_new

MARGIN = timedelta(seconds=10)
"""Added to ``timeout`` for collectives, so that a verdict ends the run before they raise."""
_INTERVAL = 1.0
"""Seconds between samples, and between beats."""
_SILENCE = 5.0
"""Seconds without a beat after which a rank counts as silent."""
_SUSPENDED = 10.0
"""Seconds between two samples after which a rank warns that it was suspended."""
_MIN_LIMIT = 60.0
"""Least seconds of a default limit."""
_LIMIT_MEDIANS = 10
"""Default limit, as a multiple of the median."""
_GRACE_MEDIANS = 3
"""Least ``grace``, as a multiple of the median step."""
_MAX_COMPUTING = 6
"""How many limits long CPU time alone counts as progress."""
_EXIT_DELAY = 3.0
"""Seconds from verdict to exit, in which the other ranks read it with their next beat, and all dump their stacks."""
_NUM_READERS = 8
"""About how many ranks read all beats."""
_MIN_SAMPLES = 60
"""Samples within steps by which a rank can be called slow, at least."""
_MAX_SAMPLES = 600
"""Newest samples within steps that are kept."""
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")


@checks_options
@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Time limits: seconds without progress on any rank after which a run counts as hanging.

    Args:
        setup: In hooks outside of batches (``setup``, ``on_validation_epoch_end``, ...), and for steps and checkpoints
            until the first has been timed. In these hooks CPU time counts as progress, for six times as long: longer
            than that nothing may compute without a new stack, such as an endless loop.
        step: In a step of training, validation, test or prediction. None: ten times the median step, at least 60 s. No
            limit exceeds ``MegatronStrategy(timeout=)``: a larger one is refused, and the defaults follow it.
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
            ConfigError: If ``timeout`` is not a number, or below one second, or a limit of the user's exceeds it.
        """
        seconds = timeout
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        require_number("timeout", seconds, at_least=1, at_most=LARGEST_COUNT)
        self.timeout = timedelta(seconds=seconds)
        self.collective_timeout = self.timeout + MARGIN
        """Timeout for the process groups."""
        self._is_on = options is not None
        self._options = options or Heartbeat()
        self._check_limits()
        self._folder = Path("stacks")
        self._threads: list[threading.Thread] = []

    def _check_limits(self) -> None:
        """Refuse limits that ``timeout`` would cut; the defaults follow it."""
        most = self.timeout.total_seconds()
        for name in ("setup", "step", "checkpoint"):
            limit = getattr(self._options, name)
            if limit is not None and limit > most and limit != getattr(Heartbeat, name):
                raise ConfigError(
                    f"Heartbeat.{name}={limit:g}: expected at most timeout={most:g} seconds, after which a collective "
                    f"ends the run, got more; raise MegatronStrategy(timeout=), or lower {name}"
                )

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
        if "://" in root:
            root = "."
        self._folder = Path(root).absolute() / "stacks"
        if device.type == "cuda":
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            if not self._folder.is_symlink():
                self._folder.mkdir(parents=True, exist_ok=True)  # torch does not create it
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(self._folder / "nccl_"))

    def start(self) -> None:
        """Start watching the calling thread; every rank must call."""
        self._rank = dist.get_rank()
        world_size = dist.get_world_size()
        if world_size == 1 or not self._is_on:
            return
        launcher = os.getppid()
        self._launcher = launcher if os.environ.get(LAUNCHER) == str(launcher) else None
        self._thread = threading.get_ident()
        prefix = f"lightning_megatron/heartbeat/{next(_runs)}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(prefix, store.clone())
        self._keys = [f"beat/{rank}" for rank in range(world_size)]
        self._reads_beats = self._rank % max(1, world_size // _NUM_READERS) == 0
        self._beats: list[Beat] = []
        self._heard_at: list[float] = []
        """When each rank's beat last changed."""
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None
        self._end_signal: tuple[float, int] | None = None
        """When the first SIGTERM or SIGINT came, and which of them it was."""
        now = time.monotonic()
        self._answered_at = now
        self._progress_at = now
        self._shown_at = now
        self._sampled_at = now
        self._saving_since: float | None = None
        """When a sample first saw the save in which the main thread is."""
        self._slow: set[int] = set()
        """Ranks that were reported as slow."""
        self._ticks = -1
        self._cpu_time = 0.0
        self._stacks: set[int] = set()
        self._last_step: tuple[int, float | None] = (progress.steps, None)
        self._step_seconds: deque[float] = deque(maxlen=101)
        """Seconds of each of the last steps."""
        self._samples: deque[tuple[int, str]] = deque(maxlen=_MAX_SAMPLES)
        """Of samples within steps: the step, and the location, "" if it waited for other ranks."""
        frames = [frame for frame, _ in traceback.walk_stack(None)]
        self._beat = Beat(*locate(frames), limit=self._limit("setup"))
        self._send_beat()
        self._signal_pipe = os.pipe2(os.O_NONBLOCK)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample_loop, daemon=True),
            threading.Thread(target=self._report_loop, daemon=True),
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
            gap = now - self._sampled_at
            if gap > _SUSPENDED:
                self._progress_at += gap
                self._shown_at += gap
                text = f"rank {self._rank} was suspended, or held the GIL, for {gap:.0f} s"
                warnings.warn(text, stacklevel=2)
            self._sampled_at = now
            self._sample(now)
            self._read_signals(now)
            if self._verdict is None:
                self._propose_verdict(now)
            if self._verdict is not None:
                self._terminate(self._verdict)
            if self._rank == 0 and self._beats:
                self._warn_of_straggler()

    def _read_signals(self, now: float) -> None:
        with contextlib.suppress(OSError):
            for signum in os.read(self._signal_pipe[0], 4096):
                if self._end_signal is None and signum in (signal.SIGTERM, signal.SIGINT):
                    self._end_signal = (now, signum)

    def _warn_of_straggler(self) -> None:
        found = find_straggler(self._beats)
        if found is not None:
            rank, text = found
            if rank not in self._slow:
                self._slow.add(rank)
                warnings.warn(text, stacklevel=2)

    def _sample(self, now: float) -> None:
        """Record where the main thread is, and whether it made progress."""
        innermost = sys._current_frames()[self._thread]
        frames = [frame for frame, _ in traceback.walk_stack(innermost)]
        location = locate(frames)
        steps = progress.steps
        ticks = progress.ticks + steps
        stack = hash(tuple((id(each.f_code), each.f_lasti) for each in frames))
        is_debugged = any(each.f_code.co_filename.endswith(_DEBUGGERS) for each in frames)
        cpu_time = time.process_time()
        uses_cpu = cpu_time - self._cpu_time > _INTERVAL / 10
        computes_until = self._shown_at + _MAX_COMPUTING * self._limit("setup")
        may_compute = location.kind == "setup" and now < computes_until
        if ticks != self._ticks:
            self._stacks.clear()
        if ticks != self._ticks or is_debugged or stack not in self._stacks:
            self._shown_at = now
            self._progress_at = now
        elif may_compute and uses_cpu and not location.is_waiting:
            self._progress_at = now
        self._time_checkpoint(location.kind, now)
        self._stacks.add(stack)
        self._ticks = ticks
        self._cpu_time = cpu_time
        before, since = self._last_step
        if steps != before:
            if since is not None:
                self._step_seconds.append((now - since) / (steps - before))
            self._last_step = (steps, now)
        if location.kind == "step":
            busy_in = "" if location.is_waiting else location.text
            self._samples.append((steps, busy_in))
        num_samples = len(self._samples)
        sampled_steps = 0
        if num_samples >= _MIN_SAMPLES:
            first_step, _ = self._samples[0]
            sampled_steps = steps - first_step
        busy = Counter(text for _, text in self._samples if text)
        self._beat = Beat(
            *location,
            serial=self._beat.serial + 1,
            stale=now - self._progress_at,
            limit=self._limit(location.kind),
            steps=steps,
            sampled_steps=sampled_steps,
            wait_fraction=1 - busy.total() / max(1, num_samples),
            busy=max(busy, key=busy.__getitem__, default=""),
        )

    def _time_checkpoint(self, kind: Kind, now: float) -> None:
        """Let the time of a save include the hooks before it, which only samples show."""
        if kind == "checkpoint":
            self._saving_since = self._saving_since or now
        elif self._saving_since is not None:
            progress.extend_last_save(now - self._saving_since)
            self._saving_since = None

    def _limit(self, kind: Kind) -> float:
        options = self._options
        limit = options.setup
        if kind == "step" and self._step_seconds:
            limit = options.step or _default_limit(self._step_seconds)
        elif kind == "checkpoint" and progress.saves:
            limit = options.checkpoint or _default_limit(progress.saves)
        return min(limit, self.timeout.total_seconds())

    def _propose_verdict(self, now: float) -> None:
        """Propose a verdict if no rank makes progress."""
        cap = math.inf
        is_saving = all(beat.kind == "checkpoint" for beat in (self._beat, *self._beats))
        # A checkpoint that all ranks have begun may be finished.
        if self._end_signal is not None and not is_saving:
            median = statistics.median(self._step_seconds or [0.0])
            cap = max(self._options.grace, _GRACE_MEDIANS * median)
        mine = self._beat
        if mine.stale < min(mine.limit, cap):
            return
        verdict = None
        unanswered = now - self._answered_at
        is_answered = unanswered <= _SILENCE
        if not is_answered:
            server = "rank 0"
            if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
                server = "torchrun's agent"
            text = f"{server} hangs, whose store has not answered for {unanswered:.0f} s (stopped or dead)"
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
        # Otherwise rank 0 prints it on the same terminal.
        if self._launcher is None or 0 in verdict.silent:
            print(f"error: {verdict.text}", file=sys.stderr, flush=True)
        # In a thread: the disk may be what hangs.
        threading.Thread(target=self._dump_stacks, daemon=True).start()
        # Others read the verdict from its store, and end with it if it has launched them.
        time.sleep(_EXIT_DELAY)
        if self._launcher is not None and 0 in verdict.silent:
            # It was stopped, and only it waits for this process.
            os.kill(self._launcher, signal.SIGKILL)
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
            # Without an answer or connection: the sampling thread handles it.
            with contextlib.suppress(RuntimeError):
                self._exchange_beats()
                self._answered_at = time.monotonic()

    def _send_beat(self) -> None:
        self._store.set(self._keys[self._rank], json.dumps(self._beat))

    def _exchange_beats(self) -> None:
        self._send_beat()
        value = b""
        if self._proposal is not None:
            value = self._store.compare_set("verdict", "", json.dumps(self._proposal))
        elif self._store.check(["verdict"]):
            value = self._store.get("verdict")
        if value:
            self._verdict = Verdict(*json.loads(value))
        if self._reads_beats or self._end_signal is not None:
            now = time.monotonic()
            beats = self._read_beats()
            if not self._beats:
                self._heard_at = [now] * len(beats)
            for rank, before in enumerate(self._beats):
                if beats[rank].serial != before.serial:
                    self._heard_at[rank] = now
            self._beats = beats

    def _read_beats(self) -> list[Beat]:
        """The last beat of each rank; of one that was stopped before its first, that it has not begun."""
        written = self._keys
        if not self._store.check(self._keys):
            written = [key for key in self._keys if self._store.check([key])]
        texts = self._store.multi_get(written)
        beats = {key: Beat(*json.loads(text)) for key, text in zip(written, texts, strict=True)}
        return [beats.get(key, UNHEARD) for key in self._keys]


def _default_limit(seconds: Iterable[float]) -> float:
    return max(_MIN_LIMIT, _LIMIT_MEDIANS * statistics.median(seconds))


def _reset_wakeup_fd() -> None:
    """Stop signals from reaching the pipe; also in DataLoader workers, which get SIGTERM when an epoch ends."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_reset_wakeup_fd)
