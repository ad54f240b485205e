"""Supervisor on one host: ``lightning-megatron fit --max-restarts N`` restarts a run that failed or was killed.

The command becomes a supervisor of a few megabytes, which imports neither torch nor Lightning and so cannot fail as
they do; the run is its child process. Whatever ends one rank ends all of them, so watching the exit code of the child
suffices. On several hosts torchrun does the same.
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
"""Environment variable: process id of this rank's launcher, with which the rank dies."""
FIRST_START = "LIGHTNING_MEGATRON_FIRST_START"
"""Environment variable of a restarted run: time of its first start, in seconds since the epoch."""
_FINAL_CODES = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes without a restart: success, wrong settings (which a restart does not mend), interrupted, preempted."""


def is_of_this_run(saved: float) -> bool:
    """Whether a checkpoint saved at the time ``saved`` was written by an earlier start of this run."""
    return saved >= float(os.environ.get(FIRST_START, "inf"))


def describe_end(code: int) -> str:
    """How a process ended.

    Args:
        code: Its exit code, or -N after signal N.
    """
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def supervise(command: Sequence[str], max_restarts: int) -> int:
    """Run ``command``, and restart it at most ``max_restarts`` times; a failure kills the rest of its process group.

    SIGINT and SIGTERM are forwarded to the child, and nothing is restarted after them.

    Returns:
        The exit code of the last start; 128 + N after signal N.
    """
    child: subprocess.Popen[bytes] | None = None
    signals: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        if child is not None and child.poll() is None:
            # As a terminal sends Ctrl-C to all ranks, and a scheduler SIGTERM to the program that it started.
            send = os.killpg if signum == signal.SIGINT else os.kill
            send(child.pid, signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, forward)
    environment = {**os.environ, LAUNCHER: str(os.getpid())}
    first_start = time.time()
    code = 0
    for attempt in range(max_restarts + 1):
        start = time.time()
        child = subprocess.Popen(command, env=environment, process_group=0)
        result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if result is not None and result.si_status != 0:
            # Before the child is reaped and its group's id can be reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
        if signals or code in _FINAL_CODES:
            break
        action = "no restart is left"
        if attempt < max_restarts:
            action = f"restart {attempt + 1} of {max_restarts}"
        duration = timedelta(seconds=round(time.time() - start))
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        line = f"error: local rank 0 {describe_end(code)} at {now}, after {duration}; {action}"
        print(line, file=sys.stderr, flush=True)
        environment[FIRST_START] = str(first_start)
    return code if code >= 0 else 128 - code
