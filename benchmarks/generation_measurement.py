"""Record of one run of the generation benchmark: a JSON line and a row of a table. Loads no torch."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.generation_cases import PEER_STATIC


@dataclass(frozen=True, kw_only=True)
class GenerationMeasurement:
    """One case by one implementation. Memory is the largest of all ranks; all else is rank 0's."""

    case: str
    implementation: str
    description: str
    device: str
    num_devices: int
    batch_size: int
    prompt_length: int
    new_tokens: int
    """Of each prompt."""
    warmup_seconds: float
    """The first call: whatever is compiled, recorded or allocated is in it."""
    call_seconds: tuple[float, ...]
    """Each later call of ``generate``, from prompts on the device to texts on the device."""
    first_token_seconds: tuple[float, ...]
    """Calls for one new token: the prompts are read, and a token of each row is chosen."""
    peak_allocated_gib: float | None
    """After the warm-up, weights included, the largest of all ranks; None on a CPU."""
    peak_reserved_gib: float | None
    """The same, of what PyTorch's allocator holds."""
    warnings: tuple[str, ...]
    """What was warned of meanwhile: steps that could not be recorded, say, and so ran kernel by kernel."""
    versions: Mapping[str, str]

    @property
    def seconds(self) -> float:
        """Median of a call."""
        return statistics.median(self.call_seconds)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows over the median, reading the prompts included."""
        return self.batch_size * self.new_tokens / self.seconds

    @property
    def prefill_seconds(self) -> float:
        """Median of a call for one new token."""
        return statistics.median(self.first_token_seconds)

    @property
    def token_seconds(self) -> float:
        """What each further token (of all rows together) takes."""
        return (self.seconds - self.prefill_seconds) / (self.new_tokens - 1)

    def to_json(self) -> str:
        """One line, with the figures that follow from the others."""
        derived = ("seconds", "tokens_per_s", "prefill_seconds", "token_seconds")
        return json.dumps({**asdict(self), **{name: getattr(self, name) for name in derived}})

    @classmethod
    def from_json(cls, line: str) -> GenerationMeasurement:
        """The opposite of ``to_json``."""
        fields: dict[str, Any] = json.loads(line)
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        for name in ("call_seconds", "first_token_seconds", "warnings"):
            known[name] = tuple(known[name])
        return cls(**known)


_COLUMNS = (
    "case",
    "implementation",
    "tok/s",
    "of transformers static",
    "s/call (all)",
    "prefill ms",
    "ms/token",
    "peak GiB allocated / reserved",
    "first call s",
)


def markdown_table(measurements: Sequence[GenerationMeasurement]) -> str:
    """One row for each measurement, each compared with what transformers does on one device, if that is there too."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(m, _ratio(m, measurements)) for m in measurements)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(m: GenerationMeasurement, ratio: float | None) -> tuple[str, ...]:
    return (
        f"{m.case} ({m.description})",
        "; ".join((m.implementation, *m.warnings)),
        f"{m.tokens_per_s:,.1f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        f"{m.seconds:.3f} ({', '.join(f'{seconds:.3f}' for seconds in m.call_seconds)})",
        f"{m.prefill_seconds * 1e3:.1f}",
        f"{m.token_seconds * 1e3:.2f}",
        "-" if m.peak_allocated_gib is None else f"{m.peak_allocated_gib:.1f} / {m.peak_reserved_gib:.1f}",
        f"{m.warmup_seconds:.1f}",
    )


def _ratio(m: GenerationMeasurement, measurements: Sequence[GenerationMeasurement]) -> float | None:
    """Tokens per second over those of the peer with the same rows on the same kind of device."""
    same_work = ("device", "batch_size", "prompt_length", "new_tokens")
    peers = [
        other.tokens_per_s
        for other in measurements
        if other.implementation == PEER_STATIC and all(getattr(other, name) == getattr(m, name) for name in same_work)
    ]
    return m.tokens_per_s / peers[-1] if peers else None


def read_measurements(file: Path) -> list[GenerationMeasurement]:
    """All lines of a file."""
    return [GenerationMeasurement.from_json(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main(files: Sequence[str]) -> int:
    """Print the table of all measurements in ``files``."""
    print(markdown_table([measurement for file in files for measurement in read_measurements(Path(file))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
