"""A rank's watch: notices that the run hangs, says which rank and where, leaves all stacks, and ends the process.

One thread looks at the main thread once a second, which costs that nothing; another tells the store of
torch.distributed at which the process groups have met, over a connection of its own. Two threads, since torch's client
waits for ever if the rank that serves the store is the one that was stopped. Rank 0 and some others, spread over the
hosts, read what all ranks have told; the first verdict counts. A run hangs when none of its ranks makes progress: ranks
that wait for one that works (caches, evaluation in a callback) do not end it.

The threads work while the main thread waits in C, and so do signals here: Python's handlers run in the main thread
only, but the byte that CPython writes to a pipe at once (``signal.set_wakeup_fd``) is read by the thread that looks.
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
import warnings
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.engine import heartbeat
from lightning_megatron.engine.heartbeat import Beat, Heartbeat, Kind, Verdict, progress
from lightning_megatron.errors import require_number

MARGIN = timedelta(seconds=10)
"""How much later than ``timeout`` collectives raise: by then the one line of a verdict has taken their place."""
_BEAT = 1.0
_SILENCE = 5.0
"""Seconds without a beat after which a rank counts as silent."""
_STANDSTILL = 10.0
"""Seconds between two looks after which a rank says that it stood still."""
_LEAST, _MEDIANS, _MEDIANS_OF_GRACE = 60.0, 10, 3
_LAST_WORDS = 3.0
"""Seconds that a rank stays for the others to hear the verdict, at their next beat, and to leave their stacks."""
_JUDGES = 8
_PERIOD = 60.0
"""Seconds between two looks for a rank that is slow."""

_LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
"""Environment variable: process id of rank 0 in those that it has started (``launch.py``, ``restarts.py``)."""
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
        launcher = int(os.environ.get(_LAUNCHER, "0"))
        self._launcher = launcher if launcher == os.getppid() else None
        self._thread = threading.get_ident()
        prefix = f"lightning_megatron/heartbeat/{next(_runs)}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(prefix, store.clone())
        self._names = [f"beat/{rank}" for rank in range(self._world_size)]
        self._is_judge = self._rank % max(1, self._world_size // _JUDGES) == 0
        self._beats: dict[int, Beat] = {}
        self._heard: dict[int, float] = {}
        """When each rank was last heard to tell something new."""
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None
        self._asked: tuple[float, int] | None = None
        """When a signal asked the run to end, and which."""
        now = self._answered = self._progressed = self._looked = time.monotonic()
        self._last_period: tuple[float, dict[int, Beat]] = (now, {})
        self._named: set[int] = set()
        """Ranks that were said to be slow."""
        self._ticks, self._computed, self._places = -1, 0.0, set[int]()
        self._stepped: tuple[int, float] | None = None
        self._steps: deque[float] = deque(maxlen=101)
        """Seconds of each."""
        self._busy: Counter[str] = Counter()
        self._beat = Beat(limit=self._limit("setup"))
        self._store.set(self._names[self._rank], json.dumps(asdict(self._beat)))
        self._signals = _Signals((signal.SIGTERM, signal.SIGINT))
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
            self._signals.close()
            self._threads = []

    # ---- the thread that looks --------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._stopped.wait(_BEAT):
            now = time.monotonic()
            if (gap := now - self._looked) > _STANDSTILL:
                self._progressed += gap
                what = f"rank {self._rank} stood still for {gap:.0f} s: it was stopped, or held Python's lock"
                warnings.warn(what, stacklevel=2)
            self._looked = now
            self._sample(now)
            for signum in self._signals.noted():
                self._asked = self._asked or (now, signum)
            if self._verdict is None:
                self._judge(now)
            if self._verdict is not None:
                self._end(self._verdict)
            if self._rank == 0:
                self._name_straggler(now)

    def _name_straggler(self, now: float) -> None:
        (since, before), beats = self._last_period, self._beats
        steps = beats[0].steps - before[0].steps if beats and before else math.inf
        if now - since < _PERIOD or not beats or steps < heartbeat.STRAGGLER_STEPS:
            return
        found = heartbeat.straggler(before, beats) if before else None
        if found is not None and found[0] not in self._named:
            self._named.add(found[0])
            warnings.warn(found[1], stacklevel=2)
        self._last_period = (now, beats)

    def _sample(self, now: float) -> None:
        """Note where the main thread is, and whether that is progress."""
        place, steps = heartbeat.place_of(sys._current_frames()[self._thread]), progress.steps
        ticks = progress.ticks + steps
        computed = time.process_time()
        computes = place.kind == "setup" and not place.waits and computed - self._computed > _BEAT / 10
        if ticks != self._ticks:
            self._places.clear()
        if ticks != self._ticks or computes or place.is_debugged or place.stack not in self._places:
            self._progressed = now
        self._places.add(place.stack)
        self._ticks, self._computed = ticks, computed
        if self._stepped is None or steps != self._stepped[0]:
            if self._stepped is not None:
                self._steps.append((now - self._stepped[1]) / (steps - self._stepped[0]))
            if self._stepped is not None or steps:
                self._stepped = (steps, now)
        is_step = place.kind == "step"
        if is_step and not place.waits:
            self._busy[str(place)] += 1
        self._beat = Beat(
            number=self._beat.number + 1,
            stale=now - self._progressed,
            limit=self._limit(place.kind),
            place=str(place),
            kind=place.kind,
            waits=bool(place.waits),
            is_users=place.is_users,
            samples=self._beat.samples + is_step,
            waited=self._beat.waited + (is_step and bool(place.waits)),
            steps=steps,
            busy=self._busy.most_common(1)[0][0] if self._busy else "",
        )

    def _limit(self, kind: Kind) -> float:
        seconds: Collection[float] = self._steps if kind == "step" else progress.saves
        given = self._options.step if kind == "step" else self._options.checkpoint
        if kind == "setup" or not seconds:
            limit = self._options.setup
        else:
            limit = max(_LEAST, _MEDIANS * statistics.median(seconds)) if given is None else given
        return min(limit, self.timeout.total_seconds())

    def _judge(self, now: float) -> None:
        """Propose a verdict if no rank makes progress."""
        most = math.inf
        is_saved = all(beat.kind == "checkpoint" for beat in (self._beat, *self._beats.values()))
        if self._asked is not None and not is_saved:  # a save that all ranks have come to may go on
            most = max(self._options.grace, _MEDIANS_OF_GRACE * statistics.median(self._steps or [0.0]))
        mine = self._beat
        if mine.stale < min(mine.limit, most):
            return
        found = None
        if now - self._answered > _SILENCE:
            server = "torchrun's agent" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
            text = f"{server} hangs, whose store has not answered for {now - self._answered:.0f} s (stopped or dead)"
            found = Verdict(text=f"{text}: rank {self._rank} waits {mine.place}", code=1, silent=[0])
        elif len(self._beats) == self._world_size:
            silent = [rank for rank, heard in self._heard.items() if now - heard > _SILENCE]
            found = heartbeat.verdict(self._beats, silent, mine, most)
        if found is None:
            return
        text = f"{found.text}; last stacks of all ranks: {self._folder}"
        if self._asked is not None:
            since, signum = self._asked
            text += f"; {signal.Signals(signum).name} came {now - since:.0f} s ago, and the run ends without saving"
            found = replace(found, code=128 + signum)
        else:
            text += f"; if it only takes long, give MegatronStrategy(heartbeat=Heartbeat({mine.kind}=...)) more seconds"
        self._proposal = replace(found, text=text)
        if now - self._answered > _SILENCE:
            self._verdict = self._proposal

    def _end(self, found: Verdict) -> None:
        """Say it, leave the stack of this rank, wait for those of others, and end the process."""
        if self._launcher is None or 0 in found.silent:  # else rank 0 says it on the same terminal
            print(f"error: {found.text}", file=sys.stderr, flush=True)
        writer = threading.Thread(target=self._leave_stacks, daemon=True)  # the disk may be what hangs
        writer.start()
        time.sleep(_LAST_WORDS)  # others ask its store for the verdict, and end with it where it has started them
        if self._launcher is not None and 0 in found.silent:
            os.kill(self._launcher, signal.SIGKILL)  # it was stopped, and nobody waits for this process but it
        os._exit(found.code)

    def _leave_stacks(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank_{self._rank}.txt").open("w") as file:
            print(
                f"rank {self._rank}: {self._beat.stale:.0f} s without progress {self._beat.place}",
                file=file,
                flush=True,
            )
            faulthandler.dump_traceback(file, all_threads=True)
        if dist.get_backend() == "nccl":
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # of builds with NCCL
            (self._folder / f"nccl_{self._rank}").write_bytes(trace)
        sys.stdout.flush()

    # ---- the thread that tells --------------------------------------------------------------------------------------

    def _tell(self) -> None:
        # After the verdict nobody asks: the store may be gone, and torch would print a stack of its own each time.
        while self._verdict is None and not self._stopped.wait(_BEAT):
            with contextlib.suppress(RuntimeError):  # no answer, no connection: the other thread sees to that
                self._exchange()
                self._answered = time.monotonic()

    def _exchange(self) -> None:
        self._store.set(self._names[self._rank], json.dumps(asdict(self._beat)))
        told = b""
        if self._proposal is not None:
            told = self._store.compare_set("verdict", "", json.dumps(asdict(self._proposal)))
        elif self._store.check(["verdict"]):
            told = self._store.get("verdict")
        if told:
            self._verdict = Verdict(**json.loads(told))
        is_reader = self._is_judge or self._asked is not None
        if not is_reader or not self._store.check(self._names):
            self._beats, self._heard = {}, {}
            return
        beats = {rank: Beat(**json.loads(text)) for rank, text in enumerate(self._store.multi_get(self._names))}
        now, before, heard = time.monotonic(), self._beats, self._heard
        self._heard = {
            rank: heard[rank] if rank in before and beat.number == before[rank].number else now
            for rank, beat in beats.items()
        }
        self._beats = beats


class _Signals:
    """Signals that have come, known at once, wherever the main thread is; its handlers still run when it can."""

    def __init__(self, signums: Collection[int]) -> None:
        self._signums, self._ends = signums, (-1, -1)
        if threading.current_thread() is not threading.main_thread():
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)

    def noted(self) -> list[int]:
        """Those that have come since the last call."""
        with contextlib.suppress(BlockingIOError, OSError):
            return [signum for signum in os.read(self._ends[0], 4096) if signum in self._signums]
        return []

    def close(self) -> None:
        """As before."""
        if self._ends[1] >= 0 and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for end in self._ends:
                os.close(end)
            self._ends = (-1, -1)


def _forget_signals() -> None:
    """In workers of DataLoaders, which get SIGTERM at an epoch's end: not a signal to this rank."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
