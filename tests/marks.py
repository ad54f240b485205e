"""Tests, and cases of parametrized ones, that do not run everywhere."""

from importlib.metadata import version
from typing import Any, Literal

import pytest
from packaging.version import Version


def exhaustive(*case: Any, id: str | None = None) -> Any:
    """One more case of what others test, too; left out by a quick run."""
    return pytest.param(*case, marks=pytest.mark.exhaustive, id=id)


def on_gpus(
    count: int,
    *case: Any,
    id: str | None = None,
) -> Any:
    """A case that needs ``count`` CUDA devices."""
    return pytest.param(*case, marks=pytest.mark.gpu(count), id=id)


def needs_transformers(lowest: str, reason: str) -> pytest.MarkDecorator:
    """Leaves a test out where the installed transformers is older than ``lowest``."""
    return pytest.mark.skipif(
        Version(version("transformers")) < Version(lowest),
        reason=reason,
    )


def accelerator_of(request: pytest.FixtureRequest) -> Literal["cpu", "gpu"]:
    """Where a parametrized test runs: on GPUs if its case is one of ``on_gpus``."""
    return "gpu" if request.node.get_closest_marker("gpu") else "cpu"
