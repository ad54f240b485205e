"""The ranks of a run: they end with their launcher, and share the batch if fewer nodes were started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import psutil
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.run.restarts import LAUNCHER

_PR_SET_PDEATHSIG = 1
_LAUNCHER_POLL_SECONDS = 5.0
_RUN_ID = "TORCHELASTIC_RUN_ID"
_TORCHRUN_VARIABLES = {_RUN_ID, "TORCHELASTIC_USE_AGENT_STORE"}
"""Variables that torchrun's agent sets for its ranks; by hand, only the first is set, to imitate it."""


def die_with_launcher() -> None:
    """End this rank when its launcher dies, for whatever reason: Lightning's, ours or torchrun's agent.

    A rank that waits in a collective for a killed rank 0 would otherwise wait until the timeout, holding its GPU, and
    one whose agent was killed would train on beside the next start. SLURM ends all processes of a step itself. Does
    nothing in a process that the user or another launcher has started: its parent may end before it.
    """
    launcher = _find_launcher()
    if launcher is None:
        return
    if sys.platform.startswith("linux") and os.getppid() == launcher.pid:
        # At once, also if this process is stopped or waits in the kernel.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _has_ended(launcher):  # while this rank was importing
        os._exit(1)
    if launcher.pid not in _watched_launchers:
        _watched_launchers.add(launcher.pid)
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


_watched_launchers: set[int] = set()
"""Process ids of launchers that a thread of this process watches."""


def _find_launcher() -> psutil.Process | None:
    """The process that has started this rank and ends its other ranks; None if there is none to watch.

    A script may stand between torchrun's agent and this rank, and has the variables of the rank; the agent has not.
    """
    try:
        if LAUNCHER in os.environ:
            own = psutil.Process(int(os.environ[LAUNCHER]))
            return own if own.pid != os.getpid() else None
        if not os.environ.keys() >= _TORCHRUN_VARIABLES:
            return None
        for parent in psutil.Process().parents():
            if parent.environ().get(_RUN_ID) != os.environ[_RUN_ID]:
                return parent
    except psutil.NoSuchProcess:
        os._exit(1)  # it died while this rank was importing
    except psutil.AccessDenied:  # of another user: no agent that this user has started
        return None
    return None


def _end_with(launcher: psutil.Process) -> None:
    while not _has_ended(launcher):
        time.sleep(_LAUNCHER_POLL_SECONDS)
    text = f"the launcher (process {launcher.pid}) has ended, so this rank ends, too"
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))
    print(f"error: rank {rank}: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def elastic_layout(
    parallel: ParallelConfig, environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> tuple[ParallelConfig, int]:
    """Layout and number of nodes of this start, for which torchrun or a scheduler may have started fewer nodes.

    Fewer data-parallel replicas then run more microbatches each: global batch, samples and their order stay the same.

    Raises:
        ConfigError: If the remaining replicas cannot share the microbatches evenly, or the nodes hold no whole number
            of replicas.
    """
    started, rest = divmod(environment.world_size(), num_processes)
    if not environment.creates_processes_externally or rest or not 0 < started < num_nodes:
        return parallel, num_nodes
    dp = parallel.data_parallel_size(num_nodes * num_processes)
    new_dp = parallel.data_parallel_size(started * num_processes)
    change = f"{started} of num_nodes={num_nodes} were started, so dp={new_dp} instead of {dp}"
    num_microbatches, rest = divmod(parallel.num_microbatches * dp, new_dp)
    if rest:
        raise ConfigError(
            f"{change}: expected replicas that share num_microbatches={parallel.num_microbatches} x {dp} evenly, got "
            f"{new_dp}; choose num_microbatches so that {new_dp} divides the product, or start all nodes"
        )
    rank_zero_info(
        f"{change}: num_microbatches={num_microbatches} instead of {parallel.num_microbatches} keeps the batch"
    )
    return replace(parallel, num_microbatches=num_microbatches), started
