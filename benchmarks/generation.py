"""Benchmark of generation: tokens per second of ``MegatronModule.generate`` beside transformers' own. See README.md.

Cases of one model and layout share a process, which builds the model once; this package and transformers have one each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.generation_cases import GENERATION_CASES, VARIANTS, GenerationCase, Variant
from benchmarks.generation_measurement import GenerationMeasurement, markdown_table, read_measurements
from benchmarks.measurement import append_line


@dataclass(frozen=True, kw_only=True)
class _Process:
    """What one process measures."""

    cases: list[GenerationCase]
    variants: list[Variant]

    @property
    def arguments(self) -> list[str]:
        """Of the command line."""
        cases = [argument for case in self.cases for argument in ("--case", case.name)]
        return cases + [argument for variant in self.variants for argument in ("--variant", variant.name)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; returns the exit code, 1 if anything failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        for case in GENERATION_CASES:
            print(f"{case.name:20} {case}")
        return 0
    processes = _processes(options)
    if not processes:
        print(f"error: {', '.join(options.variant)} runs on one device, and this case does not", file=sys.stderr)
        return 2
    if len(processes) == 1:
        return _measure(processes[0], options)
    if "LOCAL_RANK" in os.environ:
        print("error: several processes under torchrun; give one --case and one --variant", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return _one_after_the_other(processes, options, options.output or Path(folder, "out.jsonl"))


def _processes(options: argparse.Namespace) -> list[_Process]:
    """Cases that share a model together, this package before its peer, which knows one device only."""
    groups: list[list[GenerationCase]] = []
    for name in options.case:
        (case,) = (each for each in GENERATION_CASES if each.name == name)
        together = next((group for group in groups if group[0].shares_model_with(case)), None)
        if together is None:
            groups.append([case])
        else:
            together.append(case)
    found = []
    for cases in groups:
        for is_peer in (False, True):
            variants = [v for v in _variants(options) if v.is_peer == is_peer]
            if variants and not (is_peer and cases[0].num_devices > 1):
                found.append(_Process(cases=cases, variants=variants))
    return found


def _variants(options: argparse.Namespace) -> list[Variant]:
    return [v for v in VARIANTS if not options.variant or v.name in options.variant]


def _one_after_the_other(processes: Sequence[_Process], options: argparse.Namespace, output: Path) -> int:
    known = len(read_measurements(output)) if output.exists() else 0
    common = ["--calls", str(options.calls), "--output", str(output)]
    codes = []
    for process in processes:
        print(f"== {' '.join(process.arguments)}", flush=True)
        command = [sys.executable, "-m", "benchmarks.generation", *process.arguments, *common]
        codes.append(subprocess.run(command, check=False).returncode)
    measurements = read_measurements(output)[known:] if output.exists() else []
    print(f"== all\n{markdown_table(measurements)}", flush=True)
    return max(codes)


def _measure(process: _Process, options: argparse.Namespace) -> int:
    # Imported late: --list and --help must not load torch.
    from benchmarks.generation_runs import Job, run_megatron, run_peer

    found: list[GenerationMeasurement] = []

    def report(measurement: GenerationMeasurement) -> None:
        found.append(measurement)
        print(measurement.to_json(), flush=True)
        append_line(options.output, measurement.to_json())

    run = run_peer if process.variants[0].is_peer else run_megatron
    failures = run(
        Job(
            cases=process.cases,
            variants=process.variants,
            calls=options.calls,
            report=report,
        )
    )
    if found:
        print(markdown_table(found), flush=True)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the cases and end")
    names = [case.name for case in GENERATION_CASES]
    what.add_argument("--case", action="append", choices=names, help="what to generate; may be repeated")
    variants = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--variant", action="append", choices=variants, help="by what; may be repeated (default: all that there are)"
    )
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="timed calls after one of warm-up")
    parser.add_argument("--output", type=Path, help="append the measurements to this file, as lines of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
