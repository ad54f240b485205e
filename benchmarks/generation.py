"""Generation benchmark: tokens per second of ``MegatronModule.generate`` and of transformers. See README.md.

Cases with the same model and layout share a process, which builds the model once, separate for this package and
transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import GENERATION_CASES, GenerationCase
from benchmarks.measurement import PEER_STATIC, run_each

VARIANTS = {
    "eager": "lightning-megatron, growing cache",
    "static": "lightning-megatron, static cache",
    "peer": "transformers, dynamic cache",
    "peer-static": PEER_STATIC,
}
"""Implementations by variant. Peers run on one device only; a static KV cache allows CUDA graphs of decoding steps."""
_Process = tuple[list[GenerationCase], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code, 1 if anything failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    if options.list:
        for case in GENERATION_CASES:
            print(f"{case.name:20} {case}")
        return 0
    processes = _processes(options.case, options.variant or list(VARIANTS))
    if not processes:
        print(
            f"error: --variant {', '.join(options.variant)}: expected a case on one device",
            file=sys.stderr,
        )
        return 2
    if options.only is None and len(processes) > 1:
        names = [
            f"{', '.join(case.name for case in cases)}: {', '.join(variants)}"
            for cases, variants in processes
        ]
        return run_each("benchmarks.generation", arguments, names, options.output)
    # Imported late: --list and --help must not import torch.
    from benchmarks.generation_runs import Job, run_megatron, run_peer

    cases, variants = processes[options.only or 0]
    run = run_peer if _is_peer(variants[0]) else run_megatron
    return (
        1
        if run(Job(cases=cases, variants=variants, calls=options.calls, output=options.output))
        else 0
    )


def _is_peer(variant: str) -> bool:
    return variant.startswith("peer")


def _processes(names: Sequence[str], variants: Sequence[str]) -> list[_Process]:
    """Group cases by model and layout, and variants by implementation, this package before its peer."""
    cases: dict[tuple[int, str], list[GenerationCase]] = {}
    for case in GENERATION_CASES:
        if case.name in names:
            cases.setdefault((case.tp, str(case.model)), []).append(case)
    processes = []
    for (tp, _), group in cases.items():
        for is_peer in (False, True):
            selected = [
                variant
                for variant in VARIANTS
                if variant in variants and _is_peer(variant) == is_peer
            ]
            if selected and not (is_peer and tp > 1):
                processes.append((group, selected))
    return processes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation", description=__doc__, allow_abbrev=False
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print the cases and exit")
    names = [case.name for case in GENERATION_CASES]
    action.add_argument("--case", action="append", choices=names, help="may be repeated")
    parser.add_argument(
        "--variant", action="append", choices=VARIANTS, help="may be repeated (default: all)"
    )
    parser.add_argument(
        "--calls", type=int, default=3, metavar="N", help="timed calls after a warm-up call"
    )
    parser.add_argument(
        "--output", type=Path, help="append the measurements to this JSON lines file"
    )
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
