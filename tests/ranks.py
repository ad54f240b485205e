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


class _Job:
    """One call of ``run_ranks``: a folder with the function, and for each rank a log and a result."""

    def __init__(self, folder: Path, fn: Callable[..., Any], pids: list[int]) -> None:
        self.folder, self._fn, self._pids = folder, fn, pids
        self._results: dict[int, dict[str, Any]] = {}
        """Of the ranks that have ended: ``value``, or ``traceback`` and ``error_type``."""

    def wait(self, timeout: float) -> list[Any]:
        """What the ranks return; after a first failure the others have a moment to report theirs."""
        deadline = time.monotonic() + timeout
        while len(self._results) < len(self._pids) and time.monotonic() < deadline:
            had_failed = self._failed()
            self._collect()
            if self._failed() and not had_failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            time.sleep(_POLL_SECONDS)
        if failed := self._failed():
            raise self._failure(failed)
        if len(self._results) < len(self._pids):
            raise RankError(self._timeout(timeout))
        return [self._results[rank]["value"] for rank in range(len(self._pids))]

    def kill(self) -> None:
        """End every rank and what it started; each rank leads a process group of its own."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while any(_is_alive(pid) for pid in self._pids) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _collect(self) -> None:
        for rank in self._unfinished():
            # Whether it lives is asked before the file is looked for: a rank writes its result before it ends.
            alive = _is_alive(self._pids[rank])
            path = self.folder / f"result_{rank}.pickle"
            if path.exists():
                self._results[rank] = pickle.loads(path.read_bytes())
            elif not alive:
                self._results[rank] = {"traceback": f"rank {rank} (pid {self._pids[rank]}) died without a result\n"}

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(len(self._pids)) if rank not in self._results]

    def _failed(self) -> list[int]:
        """The ranks that failed, the first one first."""
        return [rank for rank, result in self._results.items() if "traceback" in result]

    def _failure(self, failed: list[int]) -> RankError:
        first, *others = failed
        told = self._results[first]
        lines = [f"{self._fn.__name__} failed on rank {first} of {len(self._pids)}\n", told["traceback"]]
        for rank in others:
            if self._results[rank]["traceback"] != told["traceback"]:
                lines.append(f"---- rank {rank} failed too ----\n{self._results[rank]['traceback']}")
        if self._unfinished():
            lines.append(f"---- killed while still running: ranks {', '.join(map(str, self._unfinished()))} ----\n")
        return RankError("".join([*lines, self._logs()]), rank=first, error_type=told.get("error_type"))

    def _timeout(self, seconds: float) -> str:
        for rank in self._unfinished():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR2)  # faulthandler writes the stacks to the rank's log
        time.sleep(0.5)
        names = ", ".join(map(str, self._unfinished()))
        return f"{self._fn.__name__} did not end within {seconds:g} s on ranks {names}; their stacks:\n{self._logs()}"

    def _logs(self) -> str:
        """The end of what each rank printed."""
        texts = [(self.folder / f"log_{rank}.txt").read_text(errors="replace") for rank in range(len(self._pids))]
        ends = [text.strip()[-_LOG_TAIL_CHARACTERS:] for text in texts]
        return "".join(f"---- output of rank {rank} ----\n{end}\n" for rank, end in enumerate(ends) if end)


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

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Do one call of ``run_ranks``."""
        self._start_if_needed()
        job = self._submit(fn, world_size, args)
        try:
            return job.wait(timeout)
        finally:
            job.kill()
            shutil.rmtree(job.folder, ignore_errors=True)

    def close(self) -> None:
        """End the warm process, and with it whatever it forked."""
        if self._zygote is not None:
            with self._zygote as zygote:
                zygote.kill()
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
        zygote: Any = self._zygote
        self._jobs += 1
        folder = Path(str(self._folder)) / f"job_{self._jobs}"
        folder.mkdir()
        request = {
            "environment": {**os.environ, **_torchrun_environment(world_size)},
            "cwd": os.getcwd(),
            "path": list(sys.path),
            # Pickled apart: the rank can unpickle it only after it has the caller's import path.
            "call": pickle.dumps((fn, args)),
        }
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        zygote.stdin.write(f"{world_size} {folder}\n")
        zygote.stdin.flush()
        reply = zygote.stdout.readline()
        if not reply:
            raise RankError("the process that ranks are forked from died; run `python -m tests.rank_zygote` to see why")
        return _Job(folder, fn, [int(pid) for pid in reply.split()])


_ports = range(15_000, 30_000)
_reserved: list[socket.socket] = []


def reserve_ports() -> None:
    """Have the ranks of this process take ports that no other process takes which has called this."""
    global _ports
    for first in range(10_000, 15_000, 100):
        guard = socket.socket()
        with contextlib.suppress(OSError):
            guard.bind(("127.0.0.1", first))
            _reserved.append(guard)
            _ports = range(first + 1, first + 100)
            return
        guard.close()
    raise RuntimeError("no ports are left: end other campaigns")


def _free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections, one of which could take it meanwhile."""
    while True:
        port = random.choice(_ports)
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


_pool = RankPool()
atexit.register(_pool.close)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 200.0) -> list[Any]:
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
