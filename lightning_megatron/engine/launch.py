"""What does a rank take from the process that started it? The run's seed, and its end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_DEFAULT_SEED = 1234


def seed_of_run() -> int:
    """The seed given to ``seed_everything`` (Lightning hands it to all ranks), else a fixed one."""
    return int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED))


def die_with_parent() -> None:
    """Have the kernel end this rank when the process that launched it dies, however it dies (Linux only).

    A child that waits in a collective for a killed rank 0 would otherwise wait until the timeout, holding its GPU.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)
