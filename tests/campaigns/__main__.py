"""Run campaigns for some minutes, several attempts at a time, and print their table.

Exit code 1 if anything was lost or hung. Ctrl-C and SIGTERM end it early, with a table of what was done until then.
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from pathlib import Path
from statistics import median

from tests.campaigns import Attempt, Outcome, faults, fuzzed
from tests.ranks import die_with_parent

_CAMPAIGNS = {**faults.CAMPAIGNS, **fuzzed.CAMPAIGNS}


def _attempt(name: str, attempt: Attempt, number: int, seed: int) -> tuple[str, Outcome]:
    """Make one; what goes wrong keeps its folder and is told at once."""
    folder = Path(tempfile.mkdtemp(prefix="campaign_", dir=Path(tempfile.gettempdir()).parent))
    outcome = attempt(random.Random(f"{seed} {number}"), folder)
    if outcome.wrong:
        print(f"attempt {number}, {name}: {outcome.wrong}; see {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return name, outcome


def _be_a_job(parent: int, folder: str) -> None:
    """In each process that makes attempts: a process that ranks are forked from, of its own."""
    die_with_parent(parent)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that prints the table


def _run(
    attempts: dict[str, Attempt], jobs: int, minutes: float, most: float, seed: int
) -> Iterator[tuple[str, Outcome]]:
    """Make ``most`` attempts in turn, ``jobs`` at a time, or those that begin in time; yield each that ends."""
    deadline, numbers, names = time.monotonic() + 60 * minutes, count(), list(attempts)
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


def _table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """A row for each kind of attempt, and one for all."""
    rows = [("campaign", "tried", "lost", "hung", "noticed after (s): median, most", "steps compared")]
    for name, found in {**outcomes, "all": [each for of_name in outcomes.values() for each in of_name]}.items():
        seconds = [each.noticed for each in found if each.noticed is not None and name != "all"]
        noticed = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        hung, wrong = sum(each.hung for each in found), sum(bool(each.wrong) for each in found)
        numbers = [str(number) for number in (len(found), wrong - hung, hung, sum(each.steps for each in found))]
        rows.append((name, *numbers[:3], noticed, numbers[3]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    names = f"of {', '.join(_CAMPAIGNS)}, or a row of their tables; all if left out"
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=names)
    parser.add_argument("--minutes", type=float, default=30, help="when the last attempt begins")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only fuzz, N attempts, however long they take")
    parser.add_argument("--jobs", type=int, default=1, help="attempts at a time; one with ranks takes two cores")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other attempts")
    given = parser.parse_args()
    chosen = set(given.campaigns or (_CAMPAIGNS if given.fuzz is None else ["fuzzed"]))
    every = {row: each for rows in _CAMPAIGNS.values() for row, each in rows.items()}
    if unknown := chosen - set(_CAMPAIGNS) - set(every):
        parser.error(f"expected some {names}, got {', '.join(unknown)}")
    rows = [row for name, rows in _CAMPAIGNS.items() for row in rows if {name, row} & chosen]
    minutes, most = (given.minutes, math.inf) if given.fuzz is None else (math.inf, given.fuzz)
    outcomes: dict[str, list[Outcome]] = {row: [] for row in rows}
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for name, outcome in _run({row: every[row] for row in rows}, given.jobs, minutes, most, given.seed):
                outcomes[name].append(outcome)
    finally:
        print(f"\n{_table(outcomes)}", flush=True)
    return int(any(each.wrong for found in outcomes.values() for each in found))


if __name__ == "__main__":
    sys.exit(main())
