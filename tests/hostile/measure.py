"""What a command takes beyond the process that it runs in, whose peak memory is reset first."""

import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cli.command import run_here

MAX_MEGABYTES = 300
MAX_SECONDS = 5.0
"""Of CPU time."""
_MAX_ADDRESS_SPACE = 16 << 30
"""A file that goes off fails its own test, not the machine."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of a command."""

    code: int
    stdout: str
    printed: str
    """stdout and stderr."""
    megabytes: float
    seconds: float


def measure(
    folder: Path, command: str, call: Callable[[], tuple[int, str, str]] | None = None
) -> Measured:
    """Run a ``lightning-megatron`` command in ``folder``, in this process and with a bounded address space.

    Args:
        folder: Working directory of the command.
        command: Its arguments, without the program's name.
        call: Function to call in place of the command; returns exit code, stdout and stderr.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size
    before = _megabytes("VmRSS")
    begin = time.process_time()
    if call is None:
        ((code, out, err),) = run_here(str(folder), [command.split()])
    else:
        code, out, err = call()
    return Measured(
        code=code,
        stdout=out,
        printed=out + err,
        megabytes=_megabytes("VmHWM") - before,
        seconds=time.process_time() - begin,
    )


def _megabytes(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
