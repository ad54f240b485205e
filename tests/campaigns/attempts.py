"""One attempt of a campaign, and the table of all of them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one attempt ended."""

    lost: str = ""
    """What was lost, or done wrong: a checkpoint, a bit of a loss, a message that does not name the cause."""
    hung: str = ""
    """What did not end in its time."""
    noticed: float | None = None
    """Seconds from the fault to the end of the last process; None where that says nothing."""
    steps: int = 0
    """Steps that were compared with those of a run without fault."""


Attempt: TypeAlias = Callable[[random.Random, Path], Outcome]
"""Makes one attempt in an empty folder, from random numbers that a seed repeats."""


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """Rows: campaigns; columns: tried, lost, hung, noticed after (median, most), steps that were bit-equal."""
    rows = [("campaign", "tried", "lost", "hung", "noticed after (s): median, most", "steps compared")]
    total: dict[str, int] = defaultdict(int)
    for name, of_name in outcomes.items():
        seconds = [each.noticed for each in of_name if each.noticed is not None]
        numbers = {
            "tried": len(of_name),
            "lost": sum(bool(each.lost) for each in of_name),
            "hung": sum(bool(each.hung) for each in of_name),
            "steps": sum(each.steps for each in of_name),
        }
        for key, number in numbers.items():
            total[key] += number
        noticed = f"{median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
        rows.append((name, *(str(numbers[key]) for key in ("tried", "lost", "hung")), noticed, str(numbers["steps"])))
    rows.append(("all", *(str(total[key]) for key in ("tried", "lost", "hung")), "", str(total["steps"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
