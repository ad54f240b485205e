"""What does a picture of a loss curve look like?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

Points = Sequence[tuple[int, float]]
"""(optimizer step, loss in nats per token)."""

_TRAIN, _VALIDATION, _RESUME = "#3b6fb6", "#d9622b", "#7a7a7a"


@dataclass(frozen=True, kw_only=True)
class LossHistory:
    """Everything that the picture shows."""

    train: Points
    """Training loss."""
    validation: Points = ()
    """Validation loss."""
    resumed_at: Sequence[int] = ()
    """Steps at which the run was continued from a checkpoint."""


def draw_loss_picture(history: LossHistory, path: Path, *, log_scale: bool = False) -> None:
    """Write the loss over the steps, with the perplexity on the right-hand axis.

    Args:
        history: What to show.
        path: File to write; its suffix is the format.
        log_scale: Whether the loss axis is logarithmic.
    """
    # The figure class draws without pyplot, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_curves(axes, history)
    if log_scale:
        axes.set_yscale("log")
        # Plain numbers: a loss of 4 * 10^0 is nobody's notation.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("Training and validation loss" if history.validation else "Training loss")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)" + (", logarithmic" if log_scale else ""))
    axes.grid(visible=True, which="both", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _add_perplexity_axis(axes)
    figure.savefig(path)


def _draw_curves(axes: Any, history: LossHistory) -> None:
    steps, losses = _columns(history.train)
    if len(losses) >= 40:
        axes.plot(steps, losses, color=_TRAIN, alpha=0.3, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=_TRAIN, linewidth=1.8, label="training (smoothed)")
    else:
        axes.plot(steps, losses, color=_TRAIN, linewidth=1.8, marker=".", label="training")
    if history.validation:
        steps, losses = _columns(history.validation)
        label = f"validation (last {losses[-1]:.3f})"
        axes.plot(steps, losses, color=_VALIDATION, linewidth=1.8, marker="o", markersize=4, label=label)
    for index, step in enumerate(history.resumed_at):
        # One entry in the legend for all of them: matplotlib leaves out labels that begin with an underscore.
        label = "resumed from a checkpoint" if index == 0 else "_resumed"
        axes.axvline(step, color=_RESUME, linewidth=1.2, linestyle="--", label=label)


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: Sequence[float], share: float = 0.04) -> list[float]:
    """Mean of each value's neighbourhood of about ``share`` of the curve, to both sides as far as there are values.

    A window that looks back only would lag behind a falling loss. At the steep beginning it shrinks on both sides, so
    that the first value stays; at the flat end only on one, so that the last is no noise. Values that are not finite
    are left out.
    """
    reach = max(1, round(share * len(values) / 2))
    finite = [value if math.isfinite(value) else None for value in values]
    sums = list(accumulate((value or 0.0 for value in finite), initial=0.0))
    counts = list(accumulate((value is not None for value in finite), initial=0))
    result = []
    for index in range(len(values)):
        back = min(reach, index)
        first, end = index - back, min(index + back + 1, len(values))
        count = counts[end] - counts[first]
        result.append((sums[end] - sums[first]) / count if count else math.nan)
    return result


def _add_perplexity_axis(axes: Any) -> None:
    low, high = axes.get_ylim()
    ticks = perplexity_ticks(low, high)
    if not ticks:
        return
    right = axes.twinx()
    right.set_yscale(axes.get_yscale())
    right.set_ylim(low, high)
    right.set_yticks([math.log(tick) for tick in ticks], [f"{tick:,g}" for tick in ticks])
    right.set_yticks([], minor=True)
    right.set_ylabel("perplexity")
    right.spines[["top"]].set_visible(False)


def perplexity_ticks(low: float, high: float) -> list[float]:
    """Round perplexities (1, 2, 5 times a power of ten) whose logarithm lies between two losses.

    Args:
        low: Loss at the bottom of the axis.
        high: Loss at the top; past 30 a perplexity says nothing, and there are no ticks.
    """
    if not 0.0 <= high <= 30.0:
        return []
    exponents = range(math.ceil(high / math.log(10)) + 1)
    round_numbers = [float(factor * 10**exponent) for exponent in exponents for factor in (1, 2, 5)]
    # A loss of 0 is a perplexity of 1, which a logarithmic loss axis cannot show.
    ticks = [number for number in round_numbers if number > 1.0 and low <= math.log(number) <= high]
    return ticks if len(ticks) <= 10 else ticks[:: math.ceil(len(ticks) / 10)]
