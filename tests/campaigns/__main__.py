"""Run campaigns for some minutes, several attempts at a time, and print their table.

Exit code 1 if anything was lost or hung. Ctrl-C and SIGTERM end it early, with a table of what was done until then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import math
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from types import ModuleType

from tests import campaigns
from tests.campaigns.attempts import Attempt, Outcome, table
from tests.rank_zygote import _die_with_parent
from tests.ranks import reserve_ports


def known_campaigns() -> dict[str, ModuleType]:
    """By name; a campaign may have ``prepare``, which makes what its attempts share."""
    names = (module.name for module in pkgutil.iter_modules(campaigns.__path__) if module.name != "__main__")
    modules = {name: importlib.import_module(f"{campaigns.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "ATTEMPTS")}


def _attempt(name: str, attempt: Attempt, number: int, seed: int) -> tuple[str, Outcome]:
    """Make one; what goes wrong keeps its folder and is told at once."""
    folder = Path(tempfile.mkdtemp(prefix="campaign_", dir=Path(tempfile.gettempdir()).parent))
    outcome = attempt(random.Random(f"{seed} {number}"), folder)
    if wrong := outcome.lost or outcome.hung:
        print(f"attempt {number}, {name}: {wrong}; see {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return name, outcome


def _be_a_job(parent: int, folder: str) -> None:
    """In each process that makes attempts: ports, and a process that ranks are forked from, of its own."""
    _die_with_parent(parent)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that prints the table
    reserve_ports()


def run(
    attempts: dict[str, Attempt], jobs: int, minutes: float, most: float, seed: int
) -> Iterator[tuple[str, Outcome]]:
    """Make ``most`` attempts in turn, ``jobs`` at a time, or those that begin before time is up; yield each that ends.

    Jobs are forks of this process: what was imported and prepared here is there in each.
    """
    deadline, numbers, names = time.monotonic() + 60 * minutes, itertools.count(), list(attempts)
    running = set[Future[tuple[str, Outcome]]]()
    with tempfile.TemporaryDirectory(prefix="campaigns_", ignore_cleanup_errors=True) as folder:
        executor = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("fork"), initializer=_be_a_job, initargs=(os.getpid(), folder)
        )
        try:
            while True:
                while len(running) < jobs and time.monotonic() < deadline and (number := next(numbers)) < most:
                    name = names[number % len(names)]
                    running.add(executor.submit(_attempt, name, attempts[name], number, seed))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in ended)
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # and what it has started dies with it


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    known = known_campaigns()
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument(
        "campaigns",
        nargs="*",
        metavar="CAMPAIGN",
        help=f"of {', '.join(known)}, or a row; all if left out",
    )
    parser.add_argument("--minutes", type=float, default=30, help="when the last attempt begins")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only fuzz, N attempts, however long they take")
    parser.add_argument("--jobs", type=int, default=1, help="attempts at a time; one with ranks takes two cores")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other attempts")
    given = parser.parse_args()
    names = given.campaigns or (list(known) if given.fuzz is None else ["fuzzed"])
    attempts: dict[str, Attempt] = {}
    for name, module in known.items():
        chosen = {row: each for row, each in module.ATTEMPTS.items() if {name, row} & set(names)}
        attempts |= chosen
        if chosen and hasattr(module, "prepare"):
            module.prepare(chosen)
    if unknown := set(names) - set(known) - set(attempts):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(known)}, nor a row of their tables")
    minutes, most = (given.minutes, math.inf) if given.fuzz is None else (math.inf, given.fuzz)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in attempts}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for name, outcome in run(attempts, given.jobs, minutes, most, given.seed):
                outcomes[name].append(outcome)
    finally:
        print(f"\n{table(outcomes)}", flush=True)
    return int(any(each.lost or each.hung for of_name in outcomes.values() for each in of_name))


if __name__ == "__main__":
    sys.exit(main())
