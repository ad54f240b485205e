"""Benchmark of checkpoints: how long a save stalls training, and how fast it is written and read. See README.md.

Each part runs in a process of its own, and its checkpoints replace each other: the folder never holds two.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.cases import CASES, Case, case_named, changed
from benchmarks.measurement import report, run_each

PARTS = ("sync", "async", "resume", "peer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the command line asks for; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    folder = Path(options.folder, "lightning_megatron_checkpoint_benchmark")
    parts = options.part or [part for part in PARTS if part != "peer" or case_named(options.case).accelerator == "gpu"]
    if options.only is None and len(parts) > 1:
        try:
            return run_each("benchmarks.checkpoint", given, parts, options.output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    number = options.only or 0
    keeps = options.keep or parts[number + 1 : number + 2] == ["resume"]
    report(_run(parts[number], folder, keeps, options), options.output)
    return 0


def _run(part: str, folder: Path, keeps: bool, options: argparse.Namespace) -> SimpleNamespace:
    # Imported late: --help must not load torch.
    from benchmarks.checkpoint_runs import SavePlan, run_peer, run_resume, run_saves

    case = changed(case_named(options.case), options.layers, num_microbatches=options.num_microbatches)
    plan = SavePlan(
        folder=folder,
        saves=options.saves,
        warmup_steps=options.warmup_steps,
        plain_steps=options.plain_steps,
        load=not options.no_load,
        keep=keeps,
    )
    if part == "resume":
        return run_resume(case, plan, _other_layout(case, options.resume_layout))
    return run_peer(case, plan) if part == "peer" else run_saves(case, plan, asynchronous=part == "async")


def _other_layout(case: Case, given: Sequence[str]) -> dict[str, Any]:
    """What was asked for as ``tp=2``; else half of the ranks are pipeline stages, the rest tensor-parallel."""
    if given:
        sizes: dict[str, Any] = {name: int(size) for name, size in (each.split("=") for each in given)}
    else:
        pp = min(2, case.num_devices)
        sizes = {"pp": pp, "tp": case.num_devices // pp}
    return {**sizes, "sequence_parallel": sizes.get("tp", 1) > 1}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__, allow_abbrev=False)
    parser.add_argument("--case", required=True, choices=[c.name for c in CASES], help="which model and layout")
    parser.add_argument("--part", action="append", choices=PARTS, help="what to run; may be repeated (default: all)")
    parser.add_argument("--saves", type=int, default=3, help="saves of a part")
    parser.add_argument("--warmup-steps", type=int, default=4, help="steps before the first timed one")
    parser.add_argument("--plain-steps", type=int, default=4, help="timed steps before the first save")
    parser.add_argument("--layers", type=int, help="fewer layers than the case has")
    parser.add_argument("--num-microbatches", type=int, help="instead of the case's; fewer make shorter steps")
    parser.add_argument("--no-load", action="store_true", help="do not load the last checkpoint at the end of a part")
    parser.add_argument("--keep", action="store_true", help="leave the last checkpoint, for a part 'resume'")
    parser.add_argument(
        "--resume-layout", nargs="+", default=[], metavar="NAME=SIZE", help="of the part 'resume', as tp=2 pp=2"
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where there is room for one checkpoint")
    parser.add_argument("--output", type=Path, help="append the measurements to this file, as lines of JSON")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
