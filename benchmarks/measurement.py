"""Record of one run of the training benchmark: a JSON line and a row of a table. Loads no torch."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of the steps of one loop."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepTimes | None:
        """Median and deciles of at least two steps; None of fewer."""
        if len(seconds) < 2:
            return None
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(median=statistics.median(seconds), p10=deciles[0], p90=deciles[-1], count=len(seconds))


@dataclass(frozen=True, kw_only=True)
class HostWaits:
    """Times that the host waited for the GPU in one step of the Trainer, by who made it wait."""

    ours: float
    """In lightning_megatron or in the engine."""
    trainer: float
    """In Lightning's own loop."""
    places: Mapping[str, float] = field(default_factory=dict)
    """Line of code to waits per step."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One case, run once by one implementation. Memory is the largest of all ranks; all else is rank 0's."""

    case: str
    implementation: str
    description: str
    device: str
    num_devices: int
    tokens_per_step: int
    """Over all ranks."""
    steps: StepTimes
    """Of the Trainer's loop, from the end of one step to the end of the next."""
    bare_steps: StepTimes | None
    """Of the engine without the Trainer and without new data, in the same process, in turns with the Trainer's."""
    tflops_causal: float
    """Model TFLOP/s per device, causal attention counted half."""
    mfu_causal: float | None
    """Of the dense peak; None on a device whose peak is not known."""
    mfu_full: float | None
    """The same with the whole attention matrix counted."""
    peak_allocated_gib: float | None
    """Since the first step, the largest of all ranks; None on a CPU."""
    peak_reserved_gib: float | None
    """Since the first step, the largest of all ranks; None on a CPU."""
    loss_first: float
    loss_last: float
    host_waits: HostWaits | None
    """None on a CPU, and where they were not counted."""
    versions: Mapping[str, str]

    @property
    def step_seconds(self) -> float:
        """Median of a step."""
        return self.steps.median

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.tokens_per_step / self.steps.median

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one device."""
        return self.tokens_per_s / self.num_devices

    @property
    def trainer_overhead(self) -> float | None:
        """By how much a step of the Trainer's loop takes longer than the engine alone: 0.01 is 1 %."""
        return None if self.bare_steps is None else self.steps.median / self.bare_steps.median - 1.0

    def to_json(self) -> str:
        """One line, with the figures that follow from the others."""
        derived = ("step_seconds", "tokens_per_s", "tokens_per_s_per_gpu", "trainer_overhead")
        return json.dumps({**asdict(self), **{name: getattr(self, name) for name in derived}})

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """The opposite of ``to_json``."""
        fields: dict[str, Any] = json.loads(line)
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        known["steps"] = StepTimes(**known["steps"])
        known["bare_steps"] = known["bare_steps"] and StepTimes(**known["bare_steps"])
        known["host_waits"] = known["host_waits"] and HostWaits(**known["host_waits"])
        return cls(**known)


_COLUMNS = (
    "case",
    "implementation",
    "s/step (p10-p90)",
    "tok/s",
    "tok/s/GPU",
    "MFU causal / full",
    "peak GiB allocated / reserved",
    "bare s/step",
    "Trainer overhead",
    "host waits ours / Trainer's",
    "loss first -> last",
    "target",
)


def markdown_table(measurements: Iterable[Measurement]) -> str:
    """One row for each measurement."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(m) for m in measurements)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(m: Measurement) -> tuple[str, ...]:
    steps = m.steps
    overhead = m.trainer_overhead
    return (
        f"{m.case} ({m.description})",
        m.implementation,
        f"{steps.median:.4f} ({steps.p10:.4f}-{steps.p90:.4f}, n={steps.count})",
        f"{m.tokens_per_s:,.0f}",
        f"{m.tokens_per_s_per_gpu:,.0f}",
        f"{_percent(m.mfu_causal)} / {_percent(m.mfu_full)}",
        "-" if m.peak_allocated_gib is None else f"{m.peak_allocated_gib:.1f} / {m.peak_reserved_gib:.1f}",
        "-" if m.bare_steps is None else f"{m.bare_steps.median:.4f} (n={m.bare_steps.count})",
        "-" if overhead is None else f"{overhead:+.2%}",
        "-" if m.host_waits is None else f"{m.host_waits.ours:g} / {m.host_waits.trainer:g}",
        f"{m.loss_first:.3f} -> {m.loss_last:.3f}",
        _verdict(m),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _verdict(m: Measurement) -> str:
    """The target of the case and whether it is met; only for the case as it is in the table, on the GPUs it is for."""
    case = next((c for c in CASES if c.name == m.case and str(c) == m.description), None)
    if case is None or case.target is None or m.device != "NVIDIA H200":
        return "-"
    met = case.target.is_met(getattr(m, case.target.metric))
    return f"{case.target} {'met' if met else 'MISSED'}"


def is_first_rank() -> bool:
    """Whether this process reports, whoever launched it."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def append_line(file: Path | None, line: str) -> None:
    """Add ``line`` to ``file``, with its folder; nothing without a file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(line + "\n")


def run_each(module: str, option: str, values: Sequence[str], given: Sequence[str], *more: Sequence[str]) -> int:
    """Run ``module`` in a process for each of ``values`` of ``option``, with otherwise the same arguments.

    Goes on after one that fails; returns 1 then. ``more`` are further arguments, those of each value.
    """
    others = [
        argument
        for before, argument in zip(["", *given], given, strict=False)
        if option not in (before, argument) and not argument.startswith(f"{option}=")
    ]
    failed = []
    for value, further in itertools.zip_longest(values, more, fillvalue=()):
        print(f"== {value}", flush=True)
        command = [sys.executable, "-m", module, option, str(value), *further, *others]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(str(value))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(files: Sequence[str]) -> int:
    """Print the table of all measurements in ``files``."""
    lines = [line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    print(markdown_table([Measurement.from_json(line) for line in lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
