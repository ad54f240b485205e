"""Benchmark records as JSON lines, and Markdown tables of them: ``python -m benchmarks.measurement FILE ...``.

A record maps names to measurements; README.md explains each of them. Does not import torch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.cases import CASES

PEER_STATIC = "transformers, static cache, compiled"
"""Implementation that generation is compared with."""
_SAME_WORK = ("device", "batch_size", "prompt_length", "new_tokens")
"""Fields of a record that must agree for the comparison."""


def _format(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)


def _format_all(values: Iterable[float], spec: str = ".2f") -> str:
    return ", ".join(format(value, spec) for value in values) or "-"


def _spread(m: Any) -> str:
    deciles = statistics.quantiles(m.steps, n=10, method="inclusive")
    return f"{m.step_seconds:.4f} ({deciles[0]:.4f}-{deciles[-1]:.4f}, n={len(m.steps)})"


def _verdict(m: Any) -> str:
    """Target of the case and whether it is met; only for unchanged cases, on H200s."""
    case = next((case for case in CASES if (case.name, str(case)) == (m.case, m.description)), None)
    if case is None or case.target is None or m.device != "NVIDIA H200":
        return "-"
    return (
        f"{case.target} {'met' if case.target.is_met(getattr(m, case.target.metric)) else 'MISSED'}"
    )


_Columns = Mapping[str, Callable[[Any], str]]
_RUN: _Columns = {
    "case": lambda m: f"{m.case} ({m.description})",
    "implementation": lambda m: m.implementation,
}
_MEMORY: _Columns = {
    "peak GiB allocated / reserved": lambda m: (
        f"{_format(m.peak_allocated_gib, '.1f')} / {_format(m.peak_reserved_gib, '.1f')}"
    )
}
_LOSSES: _Columns = {"loss first -> last": lambda m: f"{m.loss_first:.3f} -> {m.loss_last:.3f}"}

TABLES: Mapping[str, _Columns] = {
    "steps": {
        **_RUN,
        "s/step (p10-p90)": _spread,
        "tok/s": lambda m: f"{m.tokens_per_s:,.0f}",
        "tok/s/GPU": lambda m: f"{m.tokens_per_s_per_gpu:,.0f}",
        "MFU causal / full": lambda m: (
            f"{_format(m.mfu_causal, '.1%')} / {_format(m.mfu_full, '.1%')}"
        ),
        **_MEMORY,
        "bare s/step": lambda m: f"{_format(m.bare_step_seconds, '.4f')} (n={len(m.bare_steps)})",
        "Trainer overhead": lambda m: _format(m.trainer_overhead, "+.2%"),
        "host waits ours / Trainer's": lambda m: (
            f"{_format(m.host_waits_ours, 'g')} / {_format(m.host_waits_trainer, 'g')}"
        ),
        **_LOSSES,
        "target": _verdict,
    },
    "saves": {
        **_RUN,
        "GB": lambda m: _format(m.gigabytes),
        "stall s": lambda m: _format_all(save["stall"] for save in m.saves),
        "complete s": lambda m: _format_all(save["complete"] for save in m.saves),
        "GB/s": lambda m: _format_all(m.gigabytes / save["complete"] for save in m.saves),
        "s/step alone / beside a save": lambda m: (
            f"{_format(m.plain_step)} / {_format(m.step_during)}"
        ),
        "training lost s/save": lambda m: _format(m.lost_per_save),
        "load s": lambda m: _format(m.load_seconds) + f" ({m.load_layout})",
        "host GiB before / peak": lambda m: (
            f"{_format(m.host_gib_before)} / {_format(m.host_gib_peak)}"
        ),
        "GPU peak GiB": lambda m: _format(m.gpu_gib_peak),
        **_LOSSES,
    },
    "call_seconds": {
        **_RUN,
        "tok/s": lambda m: f"{m.tokens_per_s:,.1f}",
        "of transformers static": lambda m: "-" if m.of_peer is None else f"{m.of_peer:.2f}x",
        "s/call (all)": lambda m: f"{m.seconds:.3f} ({_format_all(m.call_seconds, '.3f')})",
        "prefill ms": lambda m: f"{m.prefill_seconds * 1e3:.1f}",
        "ms/token": lambda m: f"{m.token_seconds * 1e3:.2f}",
        **_MEMORY,
        "first call s": lambda m: f"{m.warmup_seconds:.1f}",
        "warnings": lambda m: "; ".join(m.warnings) or "-",
    },
}
"""Columns of the tables of training, checkpoints and generation, by a field that only their records have."""


def tables(records: Iterable[SimpleNamespace]) -> str:
    """Format a table for each benchmark that has records."""
    records = list(records)
    peers = {_work(m): m.tokens_per_s for m in records if m.implementation == PEER_STATIC}
    formatted = []
    for field, columns in TABLES.items():
        rows = [SimpleNamespace(**vars(m)) for m in records if hasattr(m, field)]
        for m in rows if field == "call_seconds" else ():
            peer = peers.get(_work(m))
            m.of_peer = peer and m.tokens_per_s / peer
        cells = [
            list(columns),
            ["---"] * len(columns),
            *([cell(m) for cell in columns.values()] for m in rows),
        ]
        formatted += ["\n".join(f"| {' | '.join(line)} |" for line in cells)] if rows else []
    return "\n\n".join(formatted)


def _work(m: Any) -> tuple[Any, ...]:
    return tuple(getattr(m, name, None) for name in _SAME_WORK)


def read(file: Path) -> list[SimpleNamespace]:
    """Read the records of a file; empty if it does not exist."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [SimpleNamespace(**json.loads(line)) for line in lines if line.strip()]


def is_first_rank() -> bool:
    """Whether this process is rank 0, which reports, whatever launched it."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def report(record: SimpleNamespace, output: Path | None) -> None:
    """Print a record and its table, and append it to ``output``; no effect on other ranks than the first."""
    if not is_first_rank():
        return
    line = json.dumps(vars(record))
    print(line)
    print(tables([record]), flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", encoding="utf-8") as opened:
            opened.write(line + "\n")


def run_each(
    module: str, arguments: Sequence[str], names: Sequence[str], output: Path | None
) -> int:
    """Run ``module`` in a separate process for each of ``names``, with ``--only INDEX``, and print their tables.

    Continues after a failure. Returns the exit code, 1 if a process failed.
    """
    if "LOCAL_RANK" in os.environ:
        print(
            f"error: {', '.join(names)} under torchrun; start torchrun once for each",
            file=sys.stderr,
        )
        return 2
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        file = output or Path(folder, "out.jsonl")
        num_earlier = len(read(file))
        for index, name in enumerate(names):
            print(f"== {name}", flush=True)
            command = [
                sys.executable,
                "-m",
                module,
                *arguments,
                "--output",
                str(file),
                "--only",
                str(index),
            ]
            if subprocess.run(command, check=False).returncode != 0:
                failed.append(name)
        print(f"== all\n{tables(read(file)[num_earlier:])}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    print(tables(record for file in sys.argv[1:] for record in read(Path(file))))
