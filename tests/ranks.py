"""Run a test function on several ranks without eight seconds of imports for each.

``run_ranks(fn, world_size, *args)`` runs ``fn(*args)`` on every rank and returns the results in rank order. The ranks
are processes of multiprocessing's fork server, which has imported torch, Lightning, Megatron and this package once
(preload.py). A forked rank starts in milliseconds and is never reused, so nothing leaks from one test to the next and a
rank may die in any way.

``fn`` must be a function at the top level of an importable module (``tests.…``), without a fixture's closure; it is
found by name in the rank. Its result must be picklable; tensors are. Each rank has the environment of ``torchrun``
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID), so ``Trainer(devices=world_size)`` and
``torch.distributed.init_process_group()`` work unchanged; whether to call either is up to ``fn``. Ranks inherit the
caller's working directory, environment and import path.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
_GRACE_SECONDS = 1.0
"""Time for other ranks to report after a first failure; usually they hang in a collective."""
_LOG_TAIL_CHARACTERS = 6000
PRELOADED = (
    "pytest",
    "numpy.ctypeslib",
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "megatron.core.fusions.fused_bias_dropout",  # reads Dynamo's rules, which takes as long as a step
    "megatron.core.models.gpt",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.megatron_bert.modeling_megatron_bert",
    "transformers.models.t5.modeling_t5",
    "lightning_megatron.cli.train",
    "lightning_megatron.convert.convert",
    "lightning_megatron.generate.live_model",
    "lightning_megatron.callbacks.model_summary",
    "lightning_megatron.models.build",
    "tests.cli.command",
    "tests.checkpoint.runs",
    "tests.families.parity",
)
"""Modules that most rank functions need, and slow imports of these."""


_NOT_PRELOADED = "flash_attn.cute"
"""FlashAttention-4 initialises CUDA where it is imported, and Megatron-Core 0.19 imports it where it is installed."""


def preload() -> None:
    """Import what most rank functions need, in a process that others are then forked from.

    A broken module is skipped here: the rank's own import shows the error.
    """
    sys.modules[_NOT_PRELOADED] = None  # type: ignore[assignment]
    for name in PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        # Imports each family.
        importlib.import_module("lightning_megatron.convert.registry").known_families()
    # Ranks may import it.
    del sys.modules[_NOT_PRELOADED]
    # Each Trainer reads the entry points of all installed packages, which no rank installs or removes.
    with contextlib.suppress(Exception):
        registry: Any = importlib.import_module("lightning.fabric.utilities.registry")
        registry.entry_points = functools.cache(registry.entry_points)
        registry.entry_points(group="lightning.pytorch.callbacks_factory")
    # Otherwise garbage collection visits every imported object in each rank (0.3 s); saving a checkpoint collects.
    gc.freeze()
    # Forking is unsafe with other threads, which may hold locks, and with CUDA, which a forked rank could not use.
    torch = sys.modules.get("torch")
    if threading.active_count() > 1 or (torch is not None and torch.cuda.is_initialized()):
        raise SystemExit("an import started a thread or initialised CUDA: preload fewer modules")


_SERVER_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    # One thread a process: the server must have none when it forks, and ranks share few cores.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    # Asking the driver library whether a GPU exists would make CUDA unusable in the forked ranks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class RankError(AssertionError):
    """A rank raised, died or timed out."""

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        error_type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first; None after a timeout."""
        self.error_type = error_type
        """Class name of the exception, e.g. ``ConfigError``; None if the process died or timed out."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 200.0,
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` ranks and return the results in rank order.

    Args:
        fn: A function at the top level of an importable module.
        world_size: Number of processes.
        args: Picklable arguments, the same for every rank.
        timeout: Seconds until all ranks are killed and their stacks shown.

    Raises:
        RankError: If a rank raises, dies or times out; the message holds tracebacks and output.
    """
    job = Job(fn, world_size, *args)
    try:
        return job.results(timeout)
    finally:
        job.close()


class Job:
    """The processes of one call of ``run_ranks``, and a directory with their output."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        with patch.dict(os.environ, _SERVER_ENVIRONMENT):
            forkserver.ensure_running()
        self.processes: list[Any] = []
        self._fn = fn
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self._pipes: list[Connection] = []
        self._ended: dict[int, dict[str, Any]] = {}
        """Results of finished ranks, in order of finishing: ``value``, or ``traceback`` and ``error_type``."""
        environment = {**os.environ, **_torchrun_environment(world_size)}
        # As bytes: tensors in a process's arguments would be shared memory.
        call = pickle.dumps((fn, args))
        for rank in range(world_size):
            receiving, sending = context.Pipe(duplex=False)
            ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_run_rank, args=(ranked, call, self._log(rank), sending)
            )
            process.start()
            sending.close()
            self.processes.append(process)
            self._pipes.append(receiving)

    def results(self, timeout: float) -> list[Any]:
        """Results in rank order; after a first failure the other ranks have ``_GRACE_SECONDS`` to report theirs."""
        deadline = time.monotonic() + timeout
        while (running := self._running()) and (seconds := deadline - time.monotonic()) > 0:
            had_failed = self._failed()
            wait(
                [
                    each
                    for rank in running
                    for each in (self._pipes[rank], self.processes[rank].sentinel)
                ],
                seconds,
            )
            self._collect()
            if self._failed() and not had_failed:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failed := self._failed():
            raise self._failure(failed)
        if self._running():
            raise RankError(self._timeout(timeout))
        return [self._ended[rank]["value"] for rank in range(len(self.processes))]

    def close(self) -> None:
        """Kill every rank with the processes that it started (its process group); delete the logs."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def logs(self) -> str:
        """The end of each rank's output."""
        paths = [self._log(rank) for rank in range(len(self.processes))]
        texts = [
            path.read_text(errors="replace").strip() if path.exists() else "" for path in paths
        ]
        ends = [text[-_LOG_TAIL_CHARACTERS:] for text in texts]
        return "".join(
            f"---- output of rank {rank} ----\n{end}\n" for rank, end in enumerate(ends) if end
        )

    def _log(self, rank: int) -> Path:
        return self._folder / f"log_{rank}.txt"

    def _collect(self) -> None:
        for rank in self._running():
            # Read before the pipe: a rank stays alive after sending its result.
            code = self.processes[rank].exitcode
            died = {"traceback": f"rank {rank} died without a result (exit code {code})\n"}
            if self._pipes[rank].poll():
                try:
                    self._ended[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    self._ended[rank] = died
            elif code is not None:
                self._ended[rank] = died

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self._ended]

    def _failed(self) -> list[int]:
        return [rank for rank, result in self._ended.items() if "traceback" in result]

    def _failure(self, failed: list[int]) -> RankError:
        first = failed[0]
        lines = [f"{self._fn.__name__} failed on rank {first} of {len(self.processes)}\n"]
        lines += [f"---- rank {rank} ----\n{self._ended[rank]['traceback']}" for rank in failed]
        if self._running():
            lines.append(
                f"---- killed while still running: ranks {', '.join(map(str, self._running()))} ----\n"
            )
        message = "".join([*lines, self.logs()])
        return RankError(
            message,
            rank=first,
            error_type=self._ended[first].get("error_type"),
        )

    def _timeout(self, seconds: float) -> str:
        for rank in self._running():
            with contextlib.suppress(ProcessLookupError):
                # faulthandler writes the stacks to the rank's log.
                os.kill(self.processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5)
        names = ", ".join(map(str, self._running()))
        return f"{self._fn.__name__} did not end within {seconds:g} s on ranks {names}; their stacks:\n{self.logs()}"


# ---- in a rank ------------------------------------------------------------------------------------------------------


def _run_rank(
    environment: dict[str, str],
    call: bytes,
    log: Path,
    results: Connection,
) -> None:
    """Call the function on one rank, send its result, and wait to be killed.

    A rank that exits by itself would close the store that rank 0 hosts, which other ranks may still need.
    """
    os.setsid()  # own process group, so that child processes can be killed with it
    die_with_parent(os.getppid())
    file = os.open(
        log,
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [__file__]
    try:
        payload = pickle.dumps({"value": _call(call)})
    except BaseException as error:  # including SystemExit: a rank that exits has returned no result
        payload = pickle.dumps(
            {"traceback": traceback.format_exc(), "error_type": type(error).__name__}
        )
    sys.stdout.flush()
    sys.stderr.flush()
    results.send_bytes(payload)
    while True:
        signal.pause()


def _call(pickled: bytes) -> Any:
    """Call the function with a fixed random state, and raise if it leaks patches or settings."""
    import numpy
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    from tests.leaks import Baseline

    torch.set_num_threads(1)
    # Lightning set it on import in the fork server, which has no rank.
    rank_zero_only.rank = int(os.environ["RANK"])  # type: ignore[attr-defined]
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    fn, args = pickle.loads(pickled)
    baseline = Baseline()
    value = fn(*args)
    if leaks := baseline.leaks():
        raise AssertionError("the rank function leaked: " + "; ".join(leaks))
    return value


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits for any reason (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


# ---- ports ----------------------------------------------------------------------------------------------------------


@functools.cache
def ports() -> tuple[range, socket.socket]:
    """Ports reserved for this process, and the bound socket that reserves them while the process lives.

    Below the ephemeral ports, so that no outgoing connection can take them.
    """
    for first in range(10_000, 30_000, 400):
        guard = socket.socket()
        with contextlib.suppress(OSError):
            guard.bind(("127.0.0.1", first))
            return range(first + 1, first + 400), guard
        guard.close()
    raise RuntimeError("no ports are left: stop other test runs")


def _free_port() -> int:
    while True:
        port = random.choice(ports()[0])
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _torchrun_environment(world_size: int) -> dict[str, str]:
    """The environment of torchrun, without the ranks, which are set in each process."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "TORCHELASTIC_RUN_ID": "ranks",
        "OMP_NUM_THREADS": "1",
    }
