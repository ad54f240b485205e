"""Checkpoint benchmark: how long a save stalls training, and write and read speed. See README.md.

Each part runs in a separate process and deletes its previous checkpoint, so that there is never more than one on disk.
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
    """Run the benchmark from the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    folder = Path(options.folder, "lightning_megatron_checkpoint_benchmark")
    parts = options.part or [
        part for part in PARTS if part != "peer" or case_named(options.case).accelerator == "gpu"
    ]
    if options.only is None and len(parts) > 1:
        try:
            return run_each("benchmarks.checkpoint", arguments, parts, options.output)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    index = options.only or 0
    keep = options.keep or parts[index + 1 : index + 2] == ["resume"]
    report(_run(parts[index], folder, keep, options), options.output)
    return 0


def _run(part: str, folder: Path, keep: bool, options: argparse.Namespace) -> SimpleNamespace:
    # Imported late: --help must not import torch.
    from benchmarks.checkpoint_runs import SavePlan, run_peer, run_resume, run_saves

    case = changed(
        case_named(options.case), options.layers, num_microbatches=options.num_microbatches
    )
    plan = SavePlan(
        folder=folder,
        saves=options.saves,
        warmup_steps=options.warmup_steps,
        plain_steps=options.plain_steps,
        load=not options.no_load,
        keep=keep,
    )
    if part == "resume":
        return run_resume(case, plan, _resume_layout(case, options.resume_layout))
    return (
        run_peer(case, plan)
        if part == "peer"
        else run_saves(case, plan, asynchronous=part == "async")
    )


def _resume_layout(case: Case, layout: Sequence[str]) -> dict[str, Any]:
    """Parse ``--resume-layout``, e.g. ``tp=2``; by default two pipeline stages, and tensor parallelism within them."""
    if layout:
        sizes: dict[str, Any] = {
            name: int(size) for name, size in (item.split("=") for item in layout)
        }
    else:
        pp = min(2, case.num_devices)
        sizes = {"pp": pp, "tp": case.num_devices // pp}
    return {**sizes, "sequence_parallel": sizes.get("tp", 1) > 1}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--case", required=True, choices=[c.name for c in CASES], help="model and layout"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="may be repeated (default: all)"
    )
    parser.add_argument("--saves", type=int, default=3, help="saves per part")
    parser.add_argument(
        "--warmup-steps", type=int, default=4, help="steps before the first timed one"
    )
    parser.add_argument(
        "--plain-steps", type=int, default=4, help="timed steps before the first save"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: the case's)")
    parser.add_argument(
        "--num-microbatches", type=int, help="fewer make shorter steps (default: the case's)"
    )
    parser.add_argument(
        "--no-load",
        action="store_true",
        help="do not load the last checkpoint at the end of a part",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the last checkpoint, for part 'resume'"
    )
    parser.add_argument(
        "--resume-layout",
        nargs="+",
        default=[],
        metavar="NAME=SIZE",
        help="layout of part 'resume', e.g. tp=2 pp=2",
    )
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="directory with room for one checkpoint"
    )
    parser.add_argument(
        "--output", type=Path, help="append the measurements to this JSON lines file"
    )
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
