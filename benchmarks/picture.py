"""Draw ``peers.png``, a bar chart of the table "Beside peers" in ``results.md``: ``python -m benchmarks.picture``."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
HEADING = "## Beside peers"


def peers(text: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """Parse the table: names of the implementations, and the figures of each case, None if missing.

    A case's name has the number of GPUs and the day in its last line.

    Args:
        text: Content of ``results.md``; the table is the first one below the heading.
    """
    section = text.split(f"\n{HEADING}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    (_, _, *names), _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines
    )
    return names, {
        f"{case}, {measured}": [_number(cell) for cell in cells] for case, measured, *cells in rows
    }


def _number(cell: str) -> float | None:
    match = re.search(r"\d[\d,]*", cell)
    return None if match is None else float(match[0].replace(",", ""))


def draw(names: list[str], figures: dict[str, list[float | None]], file: Path) -> None:
    """Draw a bar chart of each case, one below the other, each with its own scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 * len(figures) + 0.6), layout="constrained")
    for axes, (case, values) in zip(figure.subplots(len(figures), 1), figures.items(), strict=True):
        measured = [(index, value) for index, value in enumerate(values) if value is not None]
        bars = axes.barh(
            [row for row, _ in enumerate(measured)],
            [value for _, value in measured],
            color=[f"C{index}" if index < len(names) - 1 else "lightgrey" for index, _ in measured],
        )
        axes.bar_label(
            bars,
            [f"{value:,.0f} {names[index]}" for index, value in measured],
            padding=3,
            fontsize=8,
        )
        axes.set(xlim=(0, 1.6 * max(value for _, value in measured)), xticks=[], yticks=[])
        axes.set_ylabel(case.replace(", ", "\n"), rotation=0, ha="right", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    figure.suptitle(
        "tokens/s of a GPU, NVIDIA H200, measured on the day below each case", fontsize=10
    )
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    draw(*peers((FOLDER / "results.md").read_text(encoding="utf-8")), FOLDER / "peers.png")
