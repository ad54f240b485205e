"""Run campaigns for some minutes, several attempts at a time, and print their table.

Exit code 1 if anything was lost or hung. Ctrl-C and SIGTERM end it early, with a table of the attempts so far.
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
from itertools import chain, count
from pathlib import Path
from statistics import median

from tests.campaigns import Attempt, Outcome, faults, fuzzed
from tests.ranks import die_with_parent

_CAMPAIGNS = faults.CAMPAIGNS


def _attempt(
    name: str,
    attempt: Attempt,
    number: int,
    seed: int,
) -> tuple[str, Outcome]:
    """Make one attempt; a failure is printed at once and keeps its directory."""
    folder = Path(tempfile.mkdtemp(prefix="campaign_", dir=Path(tempfile.gettempdir()).parent))
    outcome = attempt(random.Random(f"{seed} {number}"), folder)
    if outcome.wrong:
        print(f"attempt {number}, {name}: {outcome.wrong}; see {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return name, outcome


def _initialize_worker(parent: int, folder: str) -> None:
    """Give each worker process its own temporary directory and thereby its own fork server."""
    die_with_parent(parent)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # only the process that prints the table handles Ctrl-C


def _run(
    attempts: dict[str, Attempt], jobs: int, minutes: float, seed: int
) -> Iterator[tuple[str, Outcome]]:
    """Begin attempts in turn, ``jobs`` at a time, until the deadline; yield each result."""
    deadline = time.monotonic() + 60 * minutes
    numbers = count()
    names = list(attempts)
    running = set[Future[tuple[str, Outcome]]]()
    with tempfile.TemporaryDirectory(prefix="campaigns_", ignore_cleanup_errors=True) as folder:
        executor = ProcessPoolExecutor(
            jobs,
            multiprocessing.get_context("fork"),
            initializer=_initialize_worker,
            initargs=(os.getpid(), folder),
        )
        try:
            while True:
                while len(running) < jobs and time.monotonic() < deadline:
                    number = next(numbers)
                    name = names[number % len(names)]
                    running.add(
                        executor.submit(
                            _attempt,
                            name,
                            attempts[name],
                            number,
                            seed,
                        )
                    )
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)
        finally:
            for process in multiprocessing.active_children():
                process.kill()  # its children die with it


def _table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Table with a row for each kind of attempt, and one for all."""
    rows = [
        ("campaign", "tried", "lost", "hung", "noticed after (s): median, most", "steps compared")
    ]
    for name, results in {**outcomes, "all": list(chain(*outcomes.values()))}.items():
        seconds = [
            result.noticed for result in results if result.noticed is not None and name != "all"
        ]
        noticed = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        hung = sum(result.hung for result in results)
        wrong = sum(bool(result.wrong) for result in results)
        steps = sum(result.steps for result in results)
        rows.append((name, str(len(results)), str(wrong - hung), str(hung), noticed, str(steps)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    names = f"of {', '.join(_CAMPAIGNS)}, or a row of their tables; all if left out"
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=names)
    parser.add_argument(
        "--minutes",
        type=float,
        help="when the last attempt begins (default: 30; no limit with --fuzz)",
    )
    parser.add_argument(
        "--fuzz",
        type=int,
        metavar="N",
        help="N damaged files for every reader instead of campaigns",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="attempts at a time; one with ranks takes two cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="another one makes other attempts")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    if options.fuzz is not None:
        if unknown := set(options.campaigns) - set(fuzzed.ROWS):
            parser.error(f"expected some of {', '.join(fuzzed.ROWS)}, got {', '.join(unknown)}")
        return fuzzed.run(
            options.campaigns or list(fuzzed.ROWS),
            attempts=options.fuzz,
            minutes=math.inf if options.minutes is None else options.minutes,
            jobs=options.jobs,
            seed=options.seed,
        )
    chosen = set(options.campaigns or _CAMPAIGNS)
    attempts = {row: attempt for rows in _CAMPAIGNS.values() for row, attempt in rows.items()}
    if unknown := chosen - set(_CAMPAIGNS) - set(attempts):
        parser.error(f"expected some {names}, got {', '.join(unknown)}")
    rows = [row for name, rows in _CAMPAIGNS.items() for row in rows if {name, row} & chosen]
    chosen_attempts = {row: attempts[row] for row in rows}
    minutes = 30.0 if options.minutes is None else options.minutes
    outcomes: dict[str, list[Outcome]] = {row: [] for row in rows}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for name, outcome in _run(chosen_attempts, options.jobs, minutes, options.seed):
                outcomes[name].append(outcome)
    finally:
        print(f"\n{_table(outcomes)}", flush=True)
    return int(any(outcome.wrong for outcome in chain(*outcomes.values())))


if __name__ == "__main__":
    sys.exit(main())
