"""Pool of ranks for tests: run a function on several ranks without eight seconds of imports for each.

``run_ranks(fn, world_size, *args)`` runs ``fn(*args)`` on every rank and returns the results in rank order. The ranks
are forked from one warm process per session (rank_zygote.py) that has imported torch, Lightning, Megatron and this
package once. A forked rank starts in milliseconds and is never reused, so nothing leaks from one test to the next and a
rank may die in any way.

``fn`` must be a function at the top level of an importable module (``tests.…``), without a fixture's closure; it is
found by name in the rank. Its result must be picklable; tensors are. Each rank has the environment of ``torchrun``
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID), so ``Trainer(devices=world_size)`` and
``torch.distributed.init_process_group()`` work unchanged; whether to call either is up to ``fn``. Ranks inherit the
caller's working directory, environment and import path.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_GRACE_SECONDS = 1.0
"""How long the other ranks may take to report once one has failed; usually they hang in a collective."""
_POLL_SECONDS = 0.01
_LOG_TAIL_CHARACTERS = 6000


class RankError(AssertionError):
    """A rank failed, died or did not end in time."""

    def __init__(self, message: str, rank: int | None = None, error_type: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; None if all were too slow."""
        self.error_type = error_type
        """Name of the exception's class, e.g. ``ConfigError``; None if the process died or was too slow."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    traceback: str | None = None
    error_type: str | None = None

    @property
    def failed(self) -> bool:
        return self.traceback is not None


@dataclass(kw_only=True)
class _Job:
    """One call of ``run_ranks``: a folder with the function, and for each rank a log and a result."""

    folder: Path
    pids: list[int]
    outcomes: dict[int, _Outcome] = field(default_factory=dict)

    def collect(self) -> _Outcome | None:
        """Read what has arrived since the last call; the first failure among it, if any."""
        first_failure = None
        for rank, pid in enumerate(self.pids):
            if rank in self.outcomes:
                continue
            # Whether it lives is asked before the file is looked for: a rank writes its result before it ends.
            alive = _is_alive(pid)
            path = self.folder / f"result_{rank}.pickle"
            if path.exists():
                self.outcomes[rank] = _Outcome(rank=rank, **pickle.loads(path.read_bytes()))
            elif not alive:
                self.outcomes[rank] = _Outcome(rank=rank, traceback=f"rank {rank} (pid {pid}) died without a result\n")
            if rank in self.outcomes and self.outcomes[rank].failed and first_failure is None:
                first_failure = self.outcomes[rank]
        return first_failure

    @property
    def finished(self) -> bool:
        return len(self.outcomes) == len(self.pids)

    def logs(self) -> str:
        """The end of what each rank printed."""
        parts = []
        for rank in range(len(self.pids)):
            text = (self.folder / f"log_{rank}.txt").read_text(errors="replace").strip()
            if text:
                parts.append(f"---- output of rank {rank} ----\n{text[-_LOG_TAIL_CHARACTERS:]}\n")
        return "".join(parts)

    def kill(self) -> None:
        """End every rank and what it started; each rank leads a process group of its own."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while any(_is_alive(pid) for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    # The zygote ignores SIGCHLD, so ended ranks are reaped at once and never linger as zombies.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class RankPool:
    """Starts ranks by asking one warm process to fork; started itself on first use and after a failure of its own."""

    def __init__(self) -> None:
        self._zygote: subprocess.Popen[str] | None = None
        self._folder: Path | None = None
        self._jobs = 0

    @property
    def pid(self) -> int | None:
        """Process id of the warm process; None before first use."""
        return self._zygote.pid if self._zygote else None

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Do one call of ``run_ranks``."""
        self._start_if_needed()
        job = self._submit(fn, world_size, args)
        try:
            return self._wait(job, fn, timeout)
        finally:
            job.kill()
            shutil.rmtree(job.folder, ignore_errors=True)

    def close(self) -> None:
        """End the warm process, and with it whatever it forked."""
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            for stream in (self._zygote.stdin, self._zygote.stdout):
                if stream is not None:
                    stream.close()
            self._zygote = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start_if_needed(self) -> None:
        if self._zygote is not None and self._zygote.poll() is None:
            return
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            # One thread a process: the warm process must have none when it forks, and ranks share few cores.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            # Asking the driver library whether a GPU exists would make CUDA unusable in the forked ranks.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def _submit(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> _Job:
        assert self._zygote is not None
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        assert self._folder is not None
        self._jobs += 1
        folder = self._folder / f"job_{self._jobs}"
        folder.mkdir()
        request = {
            "environment": {**os.environ, **_torchrun_environment(world_size)},
            "cwd": os.getcwd(),
            "path": list(sys.path),
            # Pickled apart: the rank can unpickle it only after it has the caller's import path.
            "call": pickle.dumps((fn, args)),
        }
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        self._zygote.stdin.write(f"{world_size} {folder}\n")
        self._zygote.stdin.flush()
        reply = self._zygote.stdout.readline()
        if not reply:
            raise RankError("the process that ranks are forked from died; run `python -m tests.rank_zygote` to see why")
        return _Job(folder=folder, pids=[int(pid) for pid in reply.split()])

    def _wait(self, job: _Job, fn: Callable[..., Any], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        failure: _Outcome | None = None
        while not job.finished:
            found = job.collect()
            if failure is None and found is not None:
                failure = found
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if job.finished:
                break
            if time.monotonic() > deadline:
                if failure is not None:
                    break
                raise RankError(_timeout_message(job, fn, timeout))
            time.sleep(_POLL_SECONDS)
        if failure is None:
            return [job.outcomes[rank].value for rank in range(len(job.pids))]
        raise RankError(_failure_message(job, fn, failure), rank=failure.rank, error_type=failure.error_type)


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, one of which could take it meanwhile."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _torchrun_environment(world_size: int) -> dict[str, str]:
    """What torchrun exports, apart from the ranks, which are set in each process."""
    port = _free_port()
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "ranks",
        "OMP_NUM_THREADS": "1",
    }


def _failure_message(job: _Job, fn: Callable[..., Any], first: _Outcome) -> str:
    lines = [f"{fn.__name__} failed on rank {first.rank} of {len(job.pids)}\n", first.traceback or ""]
    for outcome in job.outcomes.values():
        if outcome.failed and outcome is not first and outcome.traceback != first.traceback:
            lines.append(f"---- rank {outcome.rank} failed too ----\n{outcome.traceback}")
    unfinished = [str(rank) for rank in range(len(job.pids)) if rank not in job.outcomes]
    if unfinished:
        lines.append(f"---- killed while still running: ranks {', '.join(unfinished)} ----\n")
    return "".join([*lines, job.logs()])


def _timeout_message(job: _Job, fn: Callable[..., Any], timeout: float) -> str:
    unfinished = [rank for rank in range(len(job.pids)) if rank not in job.outcomes]
    for rank in unfinished:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pids[rank], signal.SIGUSR2)  # faulthandler writes the stacks to the rank's log
    time.sleep(0.5)
    names = ", ".join(str(rank) for rank in unfinished)
    return f"{fn.__name__} did not end within {timeout:g} s on ranks {names}; their stacks:\n{job.logs()}"


_pool = RankPool()
atexit.register(_pool.close)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` ranks and return the results in rank order.

    Args:
        fn: A function at the top level of an importable module.
        world_size: Number of processes.
        args: Picklable arguments, the same for every rank.
        timeout: Seconds until every rank is killed, its stack shown.

    Raises:
        RankError: If a rank raises, dies or does not end in time; the text holds the tracebacks and the output.
    """
    return _pool.run(fn, world_size, args, timeout)


def close_pool() -> None:
    """End the warm process; the next ``run_ranks`` starts another."""
    _pool.close()


def pool_pid() -> int | None:
    """Process id of the warm process, which stays the same for a whole session."""
    return _pool.pid
