"""Training benchmark: times the steps of cases of ``cases.py``, and writes JSON lines and a table.

Start it directly (Lightning launches the other ranks) or with torchrun. Several cases run one after the other in
separate processes, so that compiled kernels, caches and memory of one case do not affect the next.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases import CASES, case_named, changed
from benchmarks.measurement import is_first_rank, report, run_each

if TYPE_CHECKING:
    from benchmarks.recorder import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        for case in CASES:
            print(f"{case.name:20} {case}" + (f"; target {case.target}" if case.target else ""))
        return 0
    if options.only is None and len(options.case) > 1:
        return run_each("benchmarks.train_step", arguments, options.case, options.output)
    if options.expandable_segments:
        # Torch reads it at its first allocation; launched ranks inherit it.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Imported late: --list must not import torch, and the allocator's settings must be in the environment first.
    from benchmarks.recorder import Plan

    try:
        plan = Plan(
            warmup_steps=options.warmup_steps,
            steps=options.steps,
            bare_steps=options.bare_steps,
            count_host_waits=not options.no_host_waits,
            profile=options.profile,
        )
    except ValueError as error:
        parser.error(str(error))
    _run(options, plan)
    return 0


def _run(options: argparse.Namespace, plan: Plan) -> None:
    from benchmarks.runs import run_megatron, run_peer

    case = case_named(options.case[options.only or 0])
    case = changed(case, options.layers, options.micro_batch_size, options.num_microbatches)
    if options.implementation == "megatron":
        record, profile = run_megatron(case, plan, options.indexed_workers)
    else:
        record, profile = run_peer(case, plan, compiled=options.implementation == "peer-compiled")
    for line, per_step in record.host_wait_places.items() if is_first_rank() else ():
        print(f"host waits {per_step:g} x per step in {line}")
    if profile and is_first_rank():
        print(profile)
    report(record, options.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print the cases and exit")
    action.add_argument(
        "--case", action="append", choices=[c.name for c in CASES], help="may be repeated"
    )
    parser.add_argument(
        "--implementation",
        choices=("megatron", "peer", "peer-compiled"),
        default="megatron",
        help="this package, or Lightning's FSDP or DDP on the Hugging Face model, compiled layer by layer or not",
    )
    parser.add_argument(
        "--warmup-steps", type=int, default=10, help="steps before the first timed one"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps of the Trainer")
    parser.add_argument(
        "--bare-steps", type=int, default=20, help="timed steps without the Trainer; 0 for none"
    )
    parser.add_argument("--micro-batch-size", type=int, help="(default: the case's)")
    parser.add_argument("--num-microbatches", type=int, help="(default: the case's)")
    parser.add_argument("--layers", type=int, help="number of layers (default: the case's)")
    parser.add_argument(
        "--no-host-waits", action="store_true", help="do not count host synchronizations"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the top 25 kernels of 3 more steps"
    )
    parser.add_argument(
        "--expandable-segments", action="store_true", help="let torch's allocator grow its segments"
    )
    parser.add_argument(
        "--indexed-workers",
        type=int,
        metavar="N",
        help="train on an indexed dataset with N DataLoader workers",
    )
    parser.add_argument(
        "--output", type=Path, help="append the measurement to this JSON lines file"
    )
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
