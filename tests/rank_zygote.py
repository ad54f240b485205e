"""Source of ranks for tests: a warm process that has imported everything and forks on request.

Started by ranks.py. Reads lines "world_size folder" on stdin, forks that many ranks and answers with their process ids.
Each rank reads ``request.pickle``, writes ``result_<rank>.pickle`` and waits to be killed: were it to end by itself,
the store that rank 0 hosts would vanish under ranks that still need it.

Forking is safe because nothing here starts a thread or touches CUDA before the fork; ``main`` checks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

# What most rank functions need, and what it imports. A module that is broken is skipped: the rank's own import shows
# the error.
_PRELOADED = (
    "pytest",
    "numpy.ctypeslib",
    "torch._dynamo",  # torch.optim imports it at the first step
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "megatron.core.fusions.fused_bias_dropout",  # asks Dynamo for its rules, which takes as long as a step
    "megatron.core.models.gpt",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.megatron_bert.modeling_megatron_bert",
    "transformers.models.t5.modeling_t5",
    "lightning_megatron.cli.train",
    "lightning_megatron.convert.convert",
    "lightning_megatron.generate.pipeline",
    "lightning_megatron.model_summary",
    "lightning_megatron.models.build",
    "tests.cli.command",
    "tests.checkpoint.runs",
    "tests.families.parity",
)
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _run_rank(rank: int, folder: Path) -> None:
    """Do one rank's part of a job and write how it ended."""
    log = os.open(folder / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    request = pickle.loads((folder / "request.pickle").read_bytes())
    os.environ.clear()
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    try:
        payload = pickle.dumps({"value": _call(request["call"], rank)})
    except BaseException as error:  # SystemExit too: a rank that exits has not returned a result
        payload = pickle.dumps({"traceback": traceback.format_exc(), "error_type": type(error).__name__})
    sys.stdout.flush()
    sys.stderr.flush()
    unfinished = folder / f"unfinished_{rank}"
    unfinished.write_bytes(payload)
    unfinished.rename(folder / f"result_{rank}.pickle")


def _call(pickled: bytes, rank: int) -> Any:
    """Call the function with the same random state whatever ran before, and refuse patches that it leaves behind."""
    import numpy
    import torch
    from lightning_utilities.core.rank_zero import rank_zero_only

    from tests.leaks import Baseline

    torch.set_num_threads(1)
    rank_zero_only.rank = rank  # Lightning read it at import, in the warm process, where there was no rank
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    fn, args = pickle.loads(pickled)
    baseline = Baseline()
    value = fn(*args)
    if leaks := baseline.leaks():
        raise AssertionError("the rank function left behind: " + "; ".join(leaks))
    return value


def _fork_rank(rank: int, folder: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # a process group of its own, so that whatever it starts can be killed with it
        _die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _run_rank(rank, folder)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _check_fork_safety() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SystemExit("an import has initialised CUDA: forked ranks could not use it; preload less")
    # Python threads may hold a lock that a forked rank then waits for; idle threads of native libraries (a GPU machine
    # has some after importing torch) hold none.
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise SystemExit(f"an import has started a thread ({names}): a fork could deadlock; preload less")
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) > 1 and shutil.which("nvidia-smi") is None:
        raise SystemExit("an import has started a native thread: a fork could deadlock; preload less")


def main() -> None:
    """Serve until stdin closes."""
    _die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then kills us
    # Imports print warnings; stdout is for answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        importlib.import_module("lightning_megatron.convert.registry").known_families()  # imports each family
    # A collection would visit every imported object again in each rank (0.3 s); saving a checkpoint collects.
    gc.freeze()
    _check_fork_safety()
    for line in sys.stdin:
        world_size, folder = line.rstrip("\n").split(" ", 1)
        pids = [_fork_rank(rank, Path(folder)) for rank in range(int(world_size))]
        print(*pids, file=answers, flush=True)


if __name__ == "__main__":
    main()
