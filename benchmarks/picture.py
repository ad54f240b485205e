"""Draw ``peers.png``, the bars of the table "Beside peers" in ``results.md``: ``python -m benchmarks.picture``."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
HEADING = "## Beside peers"


def peers(text: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """Whose figures the table has, and those of each case, None where nobody measured.

    Args:
        text: Of ``results.md``; the table is the first below its heading.
    """
    below = text.split(f"\n{HEADING}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    (_, *names), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return names, {case: [_number(cell) for cell in cells] for case, *cells in rows}


def _number(cell: str) -> float | None:
    found = re.search(r"\d[\d,]*", cell)
    return None if found is None else float(found[0].replace(",", ""))


def draw(names: list[str], figures: dict[str, list[float | None]], file: Path) -> None:
    """A few bars for each case, one below the other, each case with a scale of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 * len(figures) + 0.6), layout="constrained")
    for axes, (case, values) in zip(figure.subplots(len(figures), 1), figures.items(), strict=True):
        known = [(index, value) for index, value in enumerate(values) if value is not None]
        bars = axes.barh(
            [row for row, _ in enumerate(known)],
            [value for _, value in known],
            color=[f"C{index}" if index < len(names) - 1 else "lightgrey" for index, _ in known],
        )
        axes.bar_label(bars, [f"{value:,.0f} {names[index]}" for index, value in known], padding=3, fontsize=8)
        axes.set(xlim=(0, 1.6 * max(value for _, value in known)), xticks=[], yticks=[])
        axes.set_ylabel(case.replace(", ", "\n"), rotation=0, ha="right", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    figure.suptitle("tokens/s of a GPU, NVIDIA H200", fontsize=10)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    draw(*peers((FOLDER / "results.md").read_text(encoding="utf-8")), FOLDER / "peers.png")
