"""Benchmark of generation: tokens per second of ``MegatronModule.generate`` beside transformers' own. See README.md.

Cases of one model and layout share a process, which builds the model once; this package and transformers have one each.
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
"""Ways to generate; a peer runs on one device only. With a static cache a decoding step can be recorded."""
_Process = tuple[list[GenerationCase], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for; returns the exit code, 1 if anything failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.list:
        for case in GENERATION_CASES:
            print(f"{case.name:20} {case}")
        return 0
    processes = _processes(options.case, options.variant or list(VARIANTS))
    if not processes:
        print(f"error: {', '.join(options.variant)} runs on one device, and this case does not", file=sys.stderr)
        return 2
    if options.only is None and len(processes) > 1:
        names = [f"{', '.join(case.name for case in cases)}: {', '.join(ways)}" for cases, ways in processes]
        return run_each("benchmarks.generation", given, names, options.output)
    # Imported late: --list and --help must not load torch.
    from benchmarks.generation_runs import Job, run_megatron, run_peer

    cases, ways = processes[options.only or 0]
    run = run_peer if _is_peer(ways[0]) else run_megatron
    return 1 if run(Job(cases=cases, variants=ways, calls=options.calls, output=options.output)) else 0


def _is_peer(variant: str) -> bool:
    return variant.startswith("peer")


def _processes(names: Sequence[str], variants: Sequence[str]) -> list[_Process]:
    """Cases that share a model together, this package before its peer."""
    cases: dict[tuple[int, str], list[GenerationCase]] = {}
    for case in GENERATION_CASES:
        if case.name in names:
            cases.setdefault((case.tp, str(case.model)), []).append(case)
    found = []
    for (tp, _), together in cases.items():
        for is_peer in (False, True):
            ways = [variant for variant in VARIANTS if variant in variants and _is_peer(variant) == is_peer]
            if ways and not (is_peer and tp > 1):
                found.append((together, ways))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the cases and end")
    names = [case.name for case in GENERATION_CASES]
    what.add_argument("--case", action="append", choices=names, help="what to generate; may be repeated")
    parser.add_argument(
        "--variant", action="append", choices=VARIANTS, help="by what; may be repeated (default: all that there are)"
    )
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="timed calls after one of warm-up")
    parser.add_argument("--output", type=Path, help="append the measurements to this file, as lines of JSON")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
