"""Cases of parametrized tests that do not run everywhere."""

from typing import Any

import pytest


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
