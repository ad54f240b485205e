"""The processes of a verification: one after another, each with its ranks, their progress, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from lightning_megatron.errors import DONE, WRONG_ARGUMENTS, ConfigError
from lightning_megatron.run.restarts import LAUNCHER
from lightning_megatron.verify.job import Progress

Start = Callable[[Path, int], None]
"""Runs the job in a folder on so many ranks, and raises ``ProcessError`` if one fails."""
OUTPUT = "output.txt"
"""File with all that the processes of a job print."""
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 30.0
"""After which a line says that the processes are still at work."""
_ERROR = "error: "


class ProcessError(Exception):
    """A process of a job that failed; the message is one line."""


def start_processes(folder: Path, num_ranks: int) -> None:
    """Run the job in ``folder`` in a process, which starts the others, and show its progress on standard error.

    Args:
        folder: Directory of the job.
        num_ranks: Number of ranks; they start each other, so it is not needed here.

    Raises:
        ProcessError: If the job failed.
        ConfigError: If an argument of the user is to blame.
    """
    del num_ranks
    command = [sys.executable, "-m", "lightning_megatron.verify", str(folder)]
    with (folder / OUTPUT).open("wb") as output:
        _run(command, folder, output)


def _run(command: list[str], folder: Path, output: IO[bytes]) -> None:
    environment = {**os.environ, **_quiet(), LAUNCHER: str(os.getpid())}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
    )
    try:
        _follow(process, Progress(folder))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    if process.returncode == DONE:
        return
    reason = last_error(folder / OUTPUT)
    if process.returncode == WRONG_ARGUMENTS:
        raise ConfigError(reason)
    raise ProcessError(f"{reason} (exit code {process.returncode})")


def _quiet() -> Mapping[str, str]:
    return {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def _follow(process: subprocess.Popen[bytes], progress: Progress) -> None:
    """Show the progress of a process until it ends."""
    phase = "starts"
    since = time.monotonic()
    shown = since
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        for line in progress.read():
            phase = line
            since = shown = time.monotonic()
            say(f"  {line}")
        if time.monotonic() - shown > _SILENT_SECONDS:
            shown = time.monotonic()
            say(f"  {phase}: for {shown - since:.0f} s now")


def say(text: str) -> None:
    """Show a line of progress."""
    print(text, file=sys.stderr, flush=True)


def last_error(path: Path) -> str:
    """The last line of a log that names an error; else the last line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    if errors:
        return errors[-1]
    return lines[-1] if lines else "it ended without a word"
