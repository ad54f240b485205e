"""Run campaigns for some minutes and print their table; exit code 1 if anything was lost or hung."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import pkgutil
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests import campaigns
from tests.campaigns.attempts import Attempt, Outcome, table


def known_attempts() -> dict[str, dict[str, Attempt]]:
    """By campaign and row of the table."""
    names = (module.name for module in pkgutil.iter_modules(campaigns.__path__) if module.name != "__main__")
    modules = {name: importlib.import_module(f"{campaigns.__name__}.{name}") for name in names}
    return {name: module.ATTEMPTS for name, module in modules.items() if hasattr(module, "ATTEMPTS")}


def run(
    attempts: dict[str, Attempt], minutes: float, most: float, seed: int, outcomes: dict[str, list[Outcome]]
) -> None:
    """Make ``most`` attempts in turn, or until time is up; what goes wrong keeps its folder and is told at once."""
    deadline, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < deadline and number < most:
        name = list(attempts)[number % len(attempts)]
        folder = Path(tempfile.mkdtemp(prefix="campaign_"))
        outcome = attempts[name](random.Random(f"{seed} {number}"), folder)
        outcomes[name].append(outcome)
        wrong = outcome.lost or outcome.hung
        if wrong:
            print(f"attempt {number}, {name}: {wrong}; see {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        number += 1


def main() -> int:
    known = known_attempts()
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__)
    parser.add_argument("campaigns", nargs="*", metavar="CAMPAIGN", help=f"of {', '.join(known)}; all if left out")
    parser.add_argument("--minutes", type=float, default=30, help="when the last attempt begins")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only fuzz, N attempts, however long they take")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other attempts")
    given = parser.parse_args()
    if unknown := set(given.campaigns) - set(known):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(known)}")
    names = given.campaigns or (known if given.fuzz is None else ["fuzzed"])
    attempts = {row: each for name in names for row, each in known[name].items()}
    minutes, most = (given.minutes, math.inf) if given.fuzz is None else (math.inf, given.fuzz)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in attempts}
    with contextlib.suppress(KeyboardInterrupt):  # then the table tells what was done until then
        run(attempts, minutes, most, given.seed, outcomes)
    print(f"\n{table(outcomes)}")
    return int(any(each.lost or each.hung for of_name in outcomes.values() for each in of_name))


if __name__ == "__main__":
    sys.exit(main())
