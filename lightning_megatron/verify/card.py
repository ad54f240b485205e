"""The card of a verification: what was compared, how, and what came out, as Markdown and as JSON."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from lightning_megatron.verify.comparison import FP32_LIMIT, TIMES_SPREAD, Outcome
from lightning_megatron.verify.job import Job
from lightning_megatron.verify.memory import Need

_PACKAGES = ("lightning-megatron", "torch", "transformers", "megatron-core", "lightning")
_QUANTITIES = ("round trip", "logits", "loss", "gradients", "tokens")
_NONE = "-"


@dataclass(kw_only=True)
class LayoutReport:
    """What came out for a layout."""

    name: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By quantity, of ``_QUANTITIES``."""
    tokens_per_s: float | None = None
    failure: str = ""
    """Why nothing could be compared; "" if it could."""

    @property
    def verdict(self) -> str:
        """``equal``, ``different`` or ``failed``."""
        if self.failure:
            return "failed"
        is_equal = all(outcome.equal for outcome in self.outcomes.values())
        return "equal" if is_equal else "different"


@dataclass(kw_only=True)
class Card:
    """Everything that a verification found."""

    job: Job
    hf_class: str
    """Class of transformers."""
    num_parameters: int
    stored_dtype: str
    """Dtype of the directory's largest weight."""
    device: str
    """Name of the processor or GPU."""
    memory: Sequence[Need]
    reference_tokens_per_s: float | None = None
    reference_attention: str = ""
    layouts: list[LayoutReport] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Tensors of the directory that belong to another head."""

    @property
    def verdict(self) -> str:
        """The worst verdict of any layout."""
        verdicts = [layout.verdict for layout in self.layouts]
        return next((each for each in ("failed", "different") if each in verdicts), "equal")

    def to_json(self) -> dict[str, Any]:
        """The card as plain data."""
        job = asdict(self.job)
        del job["layout"]
        layouts = []
        for layout in self.layouts:
            outcomes = {name: asdict(outcome) for name, outcome in layout.outcomes.items()}
            layouts.append(
                {
                    "layout": layout.name,
                    "verdict": layout.verdict,
                    "failure": layout.failure or None,
                    "compared": outcomes,
                    "tokens_per_s": layout.tokens_per_s,
                }
            )
        return {
            "verdict": self.verdict,
            "class": self.hf_class,
            "parameters": self.num_parameters,
            "stored_dtype": self.stored_dtype,
            "device": self.device,
            "settings": job,
            "versions": versions(),
            "memory_bytes": {need.what: round(need.num_bytes) for need in self.memory},
            "transformers": {
                "tokens_per_s": self.reference_tokens_per_s,
                "attention": self.reference_attention or None,
            },
            "layouts": layouts,
            "left_out": self.left_out,
        }

    def to_markdown(self) -> str:
        """The card as a page."""
        return "\n".join([*self._head(), "", *self._table(), "", *self._limits(), *self._details()])

    def _head(self) -> Iterator[str]:
        job = self.job
        yield f"# {self.hf_class}: {self.verdict}"
        yield ""
        yield (
            f"`{job.directory}`: {self.num_parameters:,} parameters, stored in {self.stored_dtype}. Computed in"
            f" {job.dtype} on {self.device}: {job.batch_size} rows of {job.seq_length} tokens, seed {job.seed}. "
            f"{', '.join(f'{name} {number}' for name, number in versions().items())}."
        )

    def _table(self) -> Iterator[str]:
        quantities = [each for each in _QUANTITIES if self._has(each)]
        has_speed = "speed" in self.job.checks
        columns = ["layout", *quantities]
        if has_speed:
            columns.append("tokens/s")
        columns.append("verdict")
        yield f"| {' | '.join(columns)} |"
        yield "|" + "---|" * len(columns)
        if has_speed:
            speed = _speed(self.reference_tokens_per_s)
            yield f"| transformers |{' |' * len(quantities)} {speed} | |"
        for layout in self.layouts:
            cells = [layout.name]
            cells += [_cell(layout.outcomes, quantity) for quantity in quantities]
            if has_speed:
                cells.append(_speed(layout.tokens_per_s))
            yield f"| {' | '.join([*cells, layout.verdict])} |"

    def _has(self, quantity: str) -> bool:
        return any(quantity in layout.outcomes for layout in self.layouts)

    def _limits(self) -> Iterator[str]:
        if self.job.dtype == "fp32":
            limit = f"{FP32_LIMIT:.0e}".replace("e-0", "e-")
            rule = (
                f"at most {limit}, as in the project's table of families: the rounding of sums that each layout adds up"
                " in another order"
            )
        else:
            rule = (
                f"at most {TIMES_SPREAD:g} times the error of transformers in {self.job.dtype}; both are measured from "
                "transformers in fp32"
            )
        if self._has("logits"):
            yield (
                "Errors are relative: of logits the largest, to their root mean square; of each gradient its norm, to "
                f"the weight's plus a twentieth of the norm of all. Equal means {rule}."
            )
        if self._has("gradients"):
            yield f"Of each gradient, {self.job.samples:,} elements are compared, or all."
        if self._has("tokens"):
            yield (
                "Tokens are greedy; a tie is a first difference between two tokens whose logits in transformers are "
                "closer than these errors."
            )
        if self._has("round trip"):
            yield "Round trip: tensors of an export that equal the directory's bit for bit."
        if self.reference_tokens_per_s is not None:
            yield (
                f"Speed: forward and backward of the same rows, median of {self.job.steps}; transformers with "
                f"{self.reference_attention} attention. Ranks on one processor share it."
            )
        if self.left_out:
            yield f"Left out, as of another head: {', '.join(self.left_out)}."

    def _details(self) -> Iterator[str]:
        lines = []
        for layout in self.layouts:
            if layout.failure:
                lines.append(f"- {layout.name} failed: {layout.failure}")
            for quantity, outcome in layout.outcomes.items():
                prefix = f"- {layout.name}, {quantity}"
                if outcome.error is not None and outcome.limit is not None:
                    prefix += f" ({outcome.error:.1e}, limit {outcome.limit:.1e})"
                lines += [f"{prefix}: {difference}" for difference in outcome.differences]
        if lines:
            yield from ("", "## Differences", "", *lines)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {"Python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def tokens_per_s(job: Job, seconds: Sequence[float]) -> float | None:
    """Median speed of the timed steps, padding included; None without any."""
    if not seconds:
        return None
    return job.batch_size * job.seq_length / statistics.median(seconds)


def _cell(outcomes: Mapping[str, Outcome], quantity: str) -> str:
    if quantity not in outcomes:
        return _NONE
    outcome = outcomes[quantity]
    return outcome.shown if outcome.equal else f"**{outcome.shown}**"


def _speed(number: float | None) -> str:
    return _NONE if number is None else f"{number:,.0f}"
