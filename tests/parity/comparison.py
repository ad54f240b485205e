"""Assertions that two training runs are equal, up to rounding from a different summation order."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.parity.sharding import Tensors
from tests.parity.training import Outcome

# Measured over all layouts and models: losses within 3 units in the last place, gradients of the first step within
# 2e-6 of their norm, weights within 9e-7 after ten steps that moved them by up to 4e-2. Gradient norms of later steps,
# taken at weights that already differ, are within 1.1e-5. The limits leave a factor of about 5.
_LOSS_RTOL = 1.5e-6
_GRADIENT_ERROR = 1e-5
_LATER_NORM_RTOL = 5e-5
_WEIGHT_ATOL = 5e-6

_TIMES_ROUNDING = 3.0
"""Two bf16 runs are each about one rounding error from the fp32 run, so up to two from each other; one in reserve."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """2-norm of the difference, relative to the 2-norm of the expected tensor."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def all_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Whether as many tensors are bitwise equal, one by one."""
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def assert_same(actual: Tensors, expected: Tensors) -> None:
    """Assert equal names, dtypes and values."""
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


def assert_same_run(actual: Outcome, expected: Outcome) -> None:
    """Assert that two fp32 runs agree up to summation order."""
    assert_same_tensors(actual.initial_weights, expected.initial_weights, atol=0.0)
    torch.testing.assert_close(
        actual.losses,
        expected.losses,
        rtol=_LOSS_RTOL,
        atol=0.0,
    )
    torch.testing.assert_close(
        actual.grad_norms, expected.grad_norms, rtol=_LATER_NORM_RTOL, atol=0.0
    )
    assert_same_gradients(actual.gradients, expected.gradients)
    assert_same_tensors(actual.weights, expected.weights)


def assert_same_gradients(actual: Tensors, expected: Tensors) -> None:
    """Assert equal gradients, relative to each tensor's norm: norms differ by orders of magnitude."""
    assert actual.keys() == expected.keys()
    errors = {key: relative_error(actual[key], expected[key]) for key in expected}
    assert max(errors.values()) < _GRADIENT_ERROR, _worst(errors)


def assert_same_tensors(actual: Tensors, expected: Tensors, atol: float = _WEIGHT_ATOL) -> None:
    """Assert that all elements are equal up to ``atol``."""
    assert actual.keys() == expected.keys()
    errors = {key: float((actual[key] - expected[key]).abs().max()) for key in expected}
    assert max(errors.values()) <= atol, _worst(errors)


def assert_same_within_rounding(actual: Outcome, expected: Outcome, exact: Outcome) -> None:
    """Assert that two 16-bit runs agree up to 16-bit rounding, measured as the distance of ``expected`` from fp32."""
    assert_same_tensors(actual.initial_weights, expected.initial_weights, atol=0.0)
    loss_rounding = max(abs(a - b) for a, b in zip(expected.losses, exact.losses, strict=True))
    torch.testing.assert_close(
        actual.losses, expected.losses, rtol=0.0, atol=_TIMES_ROUNDING * loss_rounding
    )
    for name in ("gradients", "weights"):
        ours, theirs, precise = (getattr(run, name) for run in (actual, expected, exact))
        errors = {
            key: relative_error(ours[key], theirs[key])
            / max(relative_error(theirs[key], precise[key]), 1e-6)
            for key in theirs
        }
        assert max(errors.values()) < _TIMES_ROUNDING, (
            f"{name}, in units of rounding: {_worst(errors)}"
        )


def _worst(errors: dict[str, float]) -> str:
    ordered = sorted(errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{key}: {error:.2g}" for key, error in ordered[:5])
