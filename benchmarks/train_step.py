"""How long does one training step take? Runs cases of ``cases.py`` and writes JSON lines and a table.

Started as it is (Lightning launches the other ranks), or by torchrun. Several cases run in a process each, one after
the other: nothing that one compiled, cached or left in memory helps or hinders the next.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import CASES, Case, case_named, with_batch
from benchmarks.measurement import Measurement, markdown_table


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
    case = with_batch(case_named(options.case[0]), options.micro_batch_size, options.num_microbatches)
    measurement, profile = _run(case, options)
    if _is_first_rank():
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
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def _one_process_each(names: Sequence[str], given: Sequence[str]) -> int:
    """Run the cases one after the other with otherwise the same arguments; goes on after one that fails."""
    if "LOCAL_RANK" in os.environ:
        print("error: several --case under torchrun; start torchrun once for each", file=sys.stderr)
        return 2
    others = _without_cases(given)
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks.train_step", "--case", name, *others]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _without_cases(given: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in given:
        if not skip and argument != "--case" and not argument.startswith("--case="):
            kept.append(argument)
        skip = argument == "--case"
    return kept


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
