"""Comparison of a layout's results with those of transformers, and the limits of what counts as equal.

In fp32 the limit is that of docs/families.md. In bf16 it follows from transformers itself: its own distance between
bf16 and fp32, the *spread*, is the rounding that bf16 costs; a layout may be ``TIMES_SPREAD`` times as far from fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.verify.batch import Batch, real_positions, sampled_positions
from lightning_megatron.verify.job import Result

FP32_LIMIT = 2e-5
"""Largest relative error in fp32: sums of another order, over all layers."""
TIMES_SPREAD = 3.0
"""Two computations in bf16 round independently, and the spread itself is measured on one batch."""
_SHARE_OF_ALL = 1 / 20
"""Share of the norm of all gradients in the measure of each, for those that are mathematically zero (key biases)."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the comparison of one quantity found."""

    equal: bool
    shown: str
    """Cell of the table: an error, or a count."""
    error: float | None = None
    limit: float | None = None
    differences: tuple[str, ...] = ()
    """What differs, one line each, the largest first."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Results of transformers."""

    exact: Result
    """In fp32."""
    rounded: Result | None
    """In the dtype of the job, if that is not fp32."""
    batch: Batch
    model: ModelConfig

    def compare(self, result: Result, checks: tuple[str, ...]) -> dict[str, Outcome]:
        """Compare what a layout computed, by quantity.

        Args:
            result: Of the layout.
            checks: What the job asked for.
        """
        outcomes: dict[str, Outcome] = {}
        if "round-trip" in checks:
            outcomes["round trip"] = _round_trip(result)
        if "logits" in checks:
            outcomes["logits"] = self._logits(result)
            outcomes["loss"] = self._loss(result)
        if "gradients" in checks:
            outcomes["gradients"] = self._gradients(result)
        if "generation" in checks:
            outcomes["tokens"] = self._tokens(result)
        return outcomes

    # ---- logits and loss -------------------------------------------------------------------------------------------

    def _real(self, logits: torch.Tensor | None) -> torch.Tensor:
        """Logits at real positions, [n, v]."""
        assert logits is not None
        if logits.dim() == 3:
            return logits[real_positions(self.batch, self.model)]
        return logits

    def _logits_limits(self) -> tuple[float, float]:
        """Limits of the largest absolute error and of the root mean square error of logits."""
        expected = self._real(self.exact.logits)
        if self.rounded is None:
            limit = FP32_LIMIT * _rms(expected)
            return limit, limit
        spread = self._real(self.rounded.logits) - expected
        return TIMES_SPREAD * _largest(spread), TIMES_SPREAD * _rms(spread)

    def _logits(self, result: Result) -> Outcome:
        actual = self._real(result.logits)
        expected = self._real(self.exact.logits)
        if actual.shape != expected.shape:
            text = f"have the shape {list(actual.shape)} instead of {list(expected.shape)}"
            return Outcome(equal=False, shown="other shape", differences=(text,))
        difference = actual - expected
        limits = self._logits_limits()
        errors = (_largest(difference), _rms(difference))
        equal = all(error <= limit for error, limit in zip(errors, limits, strict=True))
        scale = _rms(expected)
        differences = () if equal else (self._largest_logit(actual, expected),)
        return Outcome(
            equal=equal,
            shown=f"{errors[0] / scale:.0e}",
            error=errors[0] / scale,
            limit=limits[0] / scale,
            differences=differences,
        )

    def _largest_logit(self, actual: torch.Tensor, expected: torch.Tensor) -> str:
        error = (actual - expected).abs().nan_to_num(math.inf)
        row, column = divmod(int(error.argmax()), error.shape[1])
        values = f"{float(actual[row, column]):.6g} instead of {float(expected[row, column]):.6g}"
        assert self.exact.logits is not None
        if self.exact.logits.dim() == 3:
            place = real_positions(self.batch, self.model).nonzero()[row].tolist()
        else:
            place = [row]
        return f"largest at row {', position '.join(map(str, place))}, column {column}: {values}"

    def _loss(self, result: Result) -> Outcome:
        assert result.loss is not None
        assert self.exact.loss is not None
        scale = max(abs(self.exact.loss), 1e-30)
        limit = FP32_LIMIT * scale
        if self.rounded is not None:
            assert self.rounded.loss is not None
            # The means over few targets may agree by chance: then it is the logits that say what bf16 costs.
            spread = self._real(self.rounded.logits) - self._real(self.exact.logits)
            limit = TIMES_SPREAD * max(abs(self.rounded.loss - self.exact.loss), _rms(spread))
        error = abs(result.loss - self.exact.loss)
        equal = error <= limit
        differences = () if equal else (f"{result.loss:.7g} instead of {self.exact.loss:.7g}",)
        return Outcome(
            equal=equal,
            shown=f"{error / scale:.0e}",
            error=error / scale,
            limit=limit / scale,
            differences=differences,
        )

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _gradients(self, result: Result) -> Outcome:
        expected = self.exact.gradients
        actual = result.gradients
        if actual.keys() != expected.keys():
            names = sorted(actual.keys() ^ expected.keys())
            missing = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
            text = f"{len(names)} weights have a gradient on one side only: {missing}"
            return Outcome(equal=False, shown="other weights", differences=(text,))
        errors = _relative_errors(actual, expected)
        limits = dict.fromkeys(expected, FP32_LIMIT)
        if self.rounded is not None:
            spreads = _relative_errors(self.rounded.gradients, expected)
            usual = sorted(spreads.values())[len(spreads) // 2]
            limits = {name: TIMES_SPREAD * max(each, usual) for name, each in spreads.items()}
        wrong = [name for name in errors if not errors[name] <= limits[name]]
        wrong.sort(key=lambda name: -errors[name] / limits[name])
        differences = [_largest_gradient(name, errors[name], result, self.exact) for name in wrong]
        if len(differences) > _MOST_NAMED:
            rest = len(differences) - _MOST_NAMED
            differences[_MOST_NAMED:] = [f"and {rest:,} more of {len(errors):,} gradients"]
        worst = max(errors, key=lambda name: errors[name] / limits[name])
        return Outcome(
            equal=not wrong,
            shown=f"{errors[worst]:.0e}",
            error=errors[worst],
            limit=limits[worst],
            differences=tuple(differences),
        )

    # ---- generated tokens ------------------------------------------------------------------------------------------

    def _tokens(self, result: Result) -> Outcome:
        assert result.tokens is not None
        assert self.exact.tokens is not None
        assert self.exact.token_logits is not None
        num_new = self.exact.token_logits.shape[1]
        actual = result.tokens[:, -num_new:]
        expected = self.exact.tokens[:, -num_new:]
        if result.tokens.shape != self.exact.tokens.shape:
            text = f"have the shape {list(result.tokens.shape)} instead of {list(self.exact.tokens.shape)}"
            return Outcome(equal=False, shown="other shape", differences=(text,))
        num_equal = 0
        ties = 0
        differences = []
        for prompt, step in _first_differences(actual, expected):
            num_equal += step
            if step == num_new:
                continue
            choices = self.exact.token_logits[prompt, step]
            pair = (int(expected[prompt, step]), int(actual[prompt, step]))
            margin = float(choices[pair[0]] - choices[pair[1]])
            limit = self._tie_limit()
            if margin <= limit:
                ties += 1
                continue
            differences.append(
                f"prompt {prompt}, new token {step}: {pair[1]} instead of {pair[0]}, whose logit is larger by"
                f" {margin:.2g} (a tie would be at most {limit:.2g})"
            )
        shown = f"{num_equal} of {actual.numel()}"
        if ties:
            shown += f", {ties} tie{'s' * (ties > 1)}"
        return Outcome(equal=not differences, shown=shown, differences=tuple(differences))

    def _tie_limit(self) -> float:
        """Margin between two logits below which rounding may swap them: twice what a logit may be wrong by."""
        expected = self.exact.token_logits
        assert expected is not None
        if self.rounded is None:
            return 2 * FP32_LIMIT * _rms(expected)
        assert self.rounded.token_logits is not None
        # Of the first new tokens: before later ones the texts may differ.
        spread = self.rounded.token_logits[:, 0] - expected[:, 0]
        return 2 * TIMES_SPREAD * _largest(spread)


def _first_differences(actual: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[int, int]]:
    """For each row, its index and that of the first different token; the number of tokens if there is none."""
    for row, same in enumerate((actual == expected).tolist()):
        yield row, same.index(False) if False in same else len(same)


def _round_trip(result: Result) -> Outcome:
    wrong = result.wrong_tensors
    num_equal = result.num_tensors - len(wrong)
    differences = wrong[:_MOST_NAMED]
    if len(wrong) > _MOST_NAMED:
        differences = [*differences, f"and {len(wrong) - _MOST_NAMED:,} more"]
    return Outcome(
        equal=not wrong,
        shown=f"{num_equal:,} of {result.num_tensors:,}",
        differences=tuple(differences),
    )


def _relative_errors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Norm of each difference, relative to the tensor's norm plus a share of the norm of all."""
    norms = {name: float(tensor.norm()) for name, tensor in expected.items()}
    total = math.hypot(*norms.values())
    errors = {}
    for name, tensor in expected.items():
        if actual[name].shape != tensor.shape:
            errors[name] = math.inf
            continue
        scale = norms[name] + _SHARE_OF_ALL * total
        error = float((actual[name] - tensor).norm()) / max(scale, 1e-30)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _largest_gradient(name: str, error: float, result: Result, expected: Result) -> str:
    """Line about a gradient that differs: how much, and where most."""
    shape = expected.shapes[name]
    if result.shapes[name] != shape:
        return f"`{name}` has the shape {list(result.shapes[name])} instead of {list(shape)}"
    actual_values = result.gradients[name]
    expected_values = expected.gradients[name]
    difference = (actual_values - expected_values).abs().nan_to_num(math.inf)
    sample = int(difference.argmax())
    positions = sampled_positions(name, math.prod(shape), len(expected_values))
    flat = sample if positions is None else int(positions[sample])
    index = [int(each) for each in torch.unravel_index(torch.tensor(flat), shape)]
    values = f"{float(actual_values[sample]):.6g} instead of {float(expected_values[sample]):.6g}"
    return f"`{name}` by {error:.1e}, most at {index}: {values}"


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _largest(tensor: torch.Tensor) -> float:
    largest = float(tensor.abs().max())
    return largest if math.isfinite(largest) else math.inf
