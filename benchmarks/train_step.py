"""Benchmark of training: times the steps of cases of ``cases.py``, writes JSON lines and a table.

Started as it is (Lightning launches the other ranks), or by torchrun. Several cases run in a process each, one after
the other: nothing that one compiled, cached or left in memory helps or hinders the next.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, Case, case_named, with_batch, with_layers
from benchmarks.measurement import Measurement, append_line, is_first_rank, markdown_table, run_each


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.list:
        for case in CASES:
            print(f"{case.name:20} {case}" + (f"; target {case.target}" if case.target else ""))
        return 0
    if len(options.case) > 1:
        return _one_process_each(options.case, given)
    if options.expandable_segments:
        # Read when torch takes its first memory; ranks that are launched inherit it.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    case = with_layers(case_named(options.case[0]), options.layers)
    case = with_batch(case, options.micro_batch_size, options.num_microbatches)
    measurement, profile = _run(case, options)
    if is_first_rank():
        _report(measurement, profile, options.output)
    return 0


def _run(case: Case, options: argparse.Namespace) -> tuple[Measurement, str]:
    # Imported late: --list must not load torch, and the allocator's settings must be in the environment before.
    from benchmarks.recorder import Plan
    from benchmarks.runs import run_megatron, run_peer

    plan = Plan(
        warmup_steps=options.warmup_steps,
        steps=options.steps,
        bare_steps=options.bare_steps,
        count_host_waits=not options.no_host_waits,
        profile=options.profile,
    )
    if options.implementation == "megatron":
        return run_megatron(case, plan, options.indexed_workers)
    return run_peer(case, plan, compiled=options.implementation == "peer-compiled")


def _report(measurement: Measurement, profile: str, output: Path | None) -> None:
    if profile:
        print(profile)
    if measurement.host_waits is not None:
        for place, per_step in measurement.host_waits.places.items():
            print(f"host waits {per_step:g} x per step in {place}")
    line = measurement.to_json()
    print(line)
    print(markdown_table([measurement]), flush=True)
    append_line(output, line)


def _one_process_each(names: Sequence[str], given: Sequence[str]) -> int:
    """Run the cases one after the other with otherwise the same arguments; goes on after one that fails."""
    if "LOCAL_RANK" in os.environ:
        print("error: several --case under torchrun; start torchrun once for each", file=sys.stderr)
        return 2
    return run_each("benchmarks.train_step", "--case", names, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the cases and end")
    what.add_argument("--case", action="append", choices=[c.name for c in CASES], help="what to run; may be repeated")
    parser.add_argument(
        "--implementation",
        choices=("megatron", "peer", "peer-compiled"),
        default="megatron",
        help="this package, or Lightning's FSDP or DDP on the Hugging Face model, compiled layer by layer or not",
    )
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps before the first timed one")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of the Trainer")
    parser.add_argument("--bare-steps", type=int, default=20, help="timed steps of the engine alone; 0 for none")
    parser.add_argument("--micro-batch-size", type=int, help="instead of the case's")
    parser.add_argument("--num-microbatches", type=int, help="instead of the case's")
    parser.add_argument("--layers", type=int, help="fewer layers than the case has")
    parser.add_argument("--no-host-waits", action="store_true", help="do not count the waits of the host")
    parser.add_argument("--profile", action="store_true", help="print the top 25 kernels of 3 more steps")
    parser.add_argument("--expandable-segments", action="store_true", help="let torch's allocator grow its segments")
    parser.add_argument(
        "--indexed-workers", type=int, metavar="N", help="read an indexed dataset with N workers, not rows in memory"
    )
    parser.add_argument("--output", type=Path, help="append the measurement to this file, as a line of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
