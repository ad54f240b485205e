"""Restarts on one host: ``lightning-megatron fit --max-restarts N`` starts a run again that was killed or has failed.

The program that was typed becomes a supervisor of a few megabytes, which imports neither torch nor Lightning and so
cannot fail as they do; the run is its child. Whatever ends one rank ends them all, so the exit code of the child is all
there is to watch. torchrun does the same for several hosts, and needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from types import FrameType

LAUNCHER = "LIGHTNING_MEGATRON_LAUNCHER"
"""Environment variable: process id of what started this rank, with which it dies."""
BEGAN = "LIGHTNING_MEGATRON_BEGAN"
"""Environment variable of a run that was started again: when it was first, in seconds of the epoch."""
_FINAL_CODES = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Done, wrong settings (which a restart does not mend), interrupted, preempted."""


def is_of_this_run(saved: float) -> bool:
    """Whether a checkpoint of the time ``saved`` was written by an earlier start of this run."""
    return saved >= float(os.environ.get(BEGAN, "inf"))


def supervise(command: Sequence[str], max_restarts: int) -> int:
    """Run ``command``, and at most ``max_restarts`` times again; the others of its process group end with it.

    Ctrl-C and SIGTERM are passed on, and nothing is started again after them.

    Returns:
        The exit code of the last start; 128 + N after signal N.
    """
    child: subprocess.Popen[bytes] | None = None
    stopped_by: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        stopped_by.append(signum)
        if child is not None and child.poll() is None:
            # A terminal sends Ctrl-C to all ranks, and a scheduler SIGTERM to the program that it has started.
            (os.killpg if signum == signal.SIGINT else os.kill)(child.pid, signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)
    environment, began, code = {**os.environ, LAUNCHER: str(os.getpid())}, time.time(), 0
    for start in range(max_restarts + 1):
        begin = time.time()
        child = subprocess.Popen(command, env=environment, process_group=0)
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_status != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # before the child is reaped, and its group's id may be another's
        code = child.wait()
        if stopped_by or code in _FINAL_CODES:
            break
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        left = f"restart {start + 1} of {max_restarts}" if start < max_restarts else "no restart is left"
        lasted = timedelta(seconds=round(time.time() - begin))
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        print(f"error: local rank 0 {how} at {now}, after {lasted}; {left}", file=sys.stderr, flush=True)
        environment[BEGAN] = str(began)
    return code if code >= 0 else 128 - code
