"""What does a rank take from the process that started it? The run's seed, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
"""Environment variable: process id of the rank that started the others of its machine."""
_DEFAULT_SEED = 1234


def seed_of_run() -> int:
    """The seed given to ``seed_everything`` (Lightning hands it to all ranks), else a fixed one."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


def allow_overlap() -> None:
    """Let communication start in the order in which it was queued among computation, on GPUs of this process.

    Megatron's tensor parallelism overlaps the two only with one hardware queue. CUDA reads the variable once, when its
    first context is made, and processes that are launched later inherit it.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Undo what is written to the environment inside.

    megatron-core 0.16.1, models/common/language_module/language_module.py: building a model sets NVTE_FLASH_ATTN and
    the like for the whole process.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def announce_launcher() -> None:
    """Tell the ranks that this process is about to start who started them."""
    os.environ[_LAUNCHER] = str(os.getpid())


def die_with_launcher() -> None:
    """Have the kernel end this rank when the rank that launched it dies, however it dies (Linux only).

    A child that waits in a collective for a killed rank 0 would otherwise wait until the timeout, holding its GPU. Does
    nothing in rank 0, and where torchrun or a scheduler started the processes.
    """
    launcher = int(os.environ.get(_LAUNCHER, os.getpid()))
    if launcher == os.getpid() or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.path.exists(f"/proc/{launcher}"):  # it died while this rank was importing
        os._exit(1)
