"""Record of one run of the checkpoint benchmark: a JSON line and a row of a table. Loads no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Save:
    """One call of ``trainer.save_checkpoint``, on rank 0."""

    stall: float
    """Seconds from the call to its return: training stands still."""
    complete: float
    """Seconds from the call until the checkpoint stood whole under its name."""
    steps_during: tuple[float, ...] = ()
    """Seconds of each training step that began in between."""

    def lost(self, plain_step: float) -> float:
        """Seconds of training that the save cost: its stall, and what it slowed the steps beside it down by."""
        return self.stall + sum(seconds - plain_step for seconds in self.steps_during)


@dataclass(frozen=True, kw_only=True)
class CheckpointMeasurement:
    """Saves of one run, and a load. Memory is summed over all ranks; all else is rank 0's."""

    case: str
    implementation: str
    description: str
    device: str
    num_devices: int
    gigabytes: float | None
    """Size of one checkpoint on the disk, in 10^9 bytes."""
    saves: tuple[Save, ...]
    plain_step: float | None
    """Median seconds of the steps before the first save; None where nothing was saved."""
    load_seconds: float | None
    """From the call of the strategy's ``load_checkpoint`` to its return on all ranks; None if nothing was loaded."""
    load_layout: str
    """At which layout it was loaded."""
    host_gib_before: float | None
    """The most memory that the ranks had held before the first save; None where nothing was saved."""
    host_gib_peak: float
    """The same at the end."""
    gpu_gib_peak: float | None
    """The most that PyTorch had allocated on one GPU since the first save; None on a CPU."""
    loss_first: float
    loss_last: float
    versions: Mapping[str, str]

    @property
    def lost_per_save(self) -> float | None:
        """Mean seconds of training that a save cost."""
        if not self.saves or self.plain_step is None:
            return None
        return statistics.fmean(save.lost(self.plain_step) for save in self.saves)

    @property
    def step_during(self) -> float | None:
        """Median seconds of the steps that ran beside a save."""
        steps = [seconds for save in self.saves for seconds in save.steps_during]
        return statistics.median(steps) if steps else None

    def to_json(self) -> str:
        """One line, with the figures that follow from the others."""
        derived = {"lost_per_save": self.lost_per_save, "step_during": self.step_during}
        return json.dumps({**asdict(self), **derived})


_COLUMNS = (
    "case",
    "implementation",
    "GB",
    "stall s",
    "complete s",
    "GB/s",
    "s/step alone / beside a save",
    "training lost s/save",
    "load s",
    "host GiB before / peak",
    "GPU peak GiB",
    "loss first -> last",
)


def markdown_table(measurements: Iterable[CheckpointMeasurement]) -> str:
    """One row for each measurement; of several saves each one's figure."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(m) for m in measurements)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(m: CheckpointMeasurement) -> tuple[str, ...]:
    rates = [(m.gigabytes or 0.0) / save.complete for save in m.saves]
    return (
        f"{m.case} ({m.description})",
        m.implementation,
        _number(m.gigabytes),
        _numbers(save.stall for save in m.saves),
        _numbers(save.complete for save in m.saves),
        _numbers(rates),
        f"{_number(m.plain_step)} / {_number(m.step_during)}",
        _number(m.lost_per_save),
        "-" if m.load_seconds is None else f"{m.load_seconds:.2f} ({m.load_layout})",
        f"{_number(m.host_gib_before)} / {_number(m.host_gib_peak)}",
        _number(m.gpu_gib_peak),
        f"{m.loss_first:.3f} -> {m.loss_last:.3f}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) or "-"
