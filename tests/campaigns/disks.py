"""Disks that are full, read-only, deleted, or slow while a run saves.

The run must go on without the saves that fail, or end with a line that names the reason; what it has kept must load;
and once the disk is well again it goes on, to the last bit, as a run without faults. The disk is a tmpfs of its own;
where this process may not mount one (it is not root) only slow ones are tried.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.attempts import Attempt, Outcome
from tests.campaigns.faults import LAYOUTS, SLOW_FSYNC, run_of, run_to_end
from tests.campaigns.killed import goes_on

_PATIENCE = 60.0


@contextlib.contextmanager
def _disk(folder: Path, megabytes: int) -> Iterator[Path]:
    kept = folder / "kept"
    kept.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", kept], check=True)
    try:
        yield kept
    finally:
        subprocess.run(["umount", "-l", kept], check=True)


def _after(seconds: float, work: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def _fill(kept: Path, rng: random.Random) -> Callable[[], None]:
    """Fill the disk; returns what frees it."""
    left = shutil.disk_usage(kept).free - rng.choice((0, 4096, 50_000, 200_000))
    with contextlib.suppress(OSError), (kept / "filler").open("wb") as file:
        file.write(bytes(max(left, 0)))
    return lambda: (kept / "filler").unlink(missing_ok=True)


def _remount(kept: Path, rng: random.Random) -> Callable[[], None]:
    def mount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", kept], check=False, capture_output=True)

    mount("ro")  # refused while a file is open for writing: then the disk stays as it is
    return lambda: mount("rw")


def _delete(kept: Path, rng: random.Random) -> Callable[[], None]:
    for each in kept.iterdir():
        shutil.rmtree(each, ignore_errors=True)
    return lambda: None


def _attempt(
    harm: Callable[[Path, random.Random], Callable[[], None]], loses_all: bool, rng: random.Random, folder: Path
) -> Outcome:
    layout = rng.choice(list(LAYOUTS))
    undone: list[Callable[[], None]] = []
    with _disk(folder, 64) as kept:
        harmed = _after(rng.uniform(0.3, 3), lambda: undone.append(harm(kept, rng)))
        begin = time.monotonic()
        ended = run_to_end(run_of(layout, async_save=rng.random() < 0.5), folder, None, _PATIENCE)
        harmed.join()
        seconds = time.monotonic() - begin
        for undo in undone:
            undo()
        if ended.left:
            return Outcome(hung=f"{layout}: ranks {ended.left} are still there\n{ended.printed}")
        wrong = set(ended.codes.values()) - {0, 1}
        if wrong or (1 in ended.codes.values() and "is not written" not in _flat(ended.printed, loses_all)):
            return Outcome(lost=f"{layout}: codes {ended.codes} without a reason\n{ended.printed}")
        lost, steps = goes_on(layout, folder)
    return Outcome(lost=lost and f"{layout}: {lost}", noticed=seconds, steps=steps)


def _flat(printed: str, loses_all: bool) -> str:
    told = " ".join(printed.split())
    known = ("is not written", "cannot be saved", *(("does not exist", "No such file") if loses_all else ()))
    return "is not written" if any(each in told for each in known) else told


def _slow(rng: random.Random, folder: Path) -> Outcome:
    """Files take long to reach the disk: the run waits, or trains on, and keeps the same."""
    layout = rng.choice(list(LAYOUTS))
    os.environ[SLOW_FSYNC] = str(rng.uniform(0.05, 0.4))
    try:
        begin = time.monotonic()
        ended = run_to_end(run_of(layout, async_save=rng.random() < 0.5), folder, None, 180)
    finally:
        del os.environ[SLOW_FSYNC]
    if ended.left:
        return Outcome(hung=f"{layout}: ranks {ended.left} are still there\n{ended.printed}")
    lost, steps = goes_on(layout, folder)
    return Outcome(lost=lost and f"{layout}: {lost}", noticed=time.monotonic() - begin, steps=steps)


ATTEMPTS: dict[str, Attempt] = {"disk: slow": _slow}
if os.geteuid() == 0:
    ATTEMPTS |= {
        "disk: full": functools.partial(_attempt, _fill, False),
        "disk: read-only": functools.partial(_attempt, _remount, False),
        "disk: checkpoints deleted": functools.partial(_attempt, _delete, True),
    }
