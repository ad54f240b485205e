"""Functions of a few elementwise kernels that are compiled on a GPU and run eagerly on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _compiled(function: Any, is_dynamic: bool | None) -> Any:
    """Compile once per process; on a GPU the eager form would write several float32 copies of its inputs."""
    return torch.compile(function, dynamic=is_dynamic)


def compiled_for(x: Tensor, function: Any, *, is_dynamic: bool | None = None) -> Any:
    """``function``, compiled if ``x`` is on a GPU.

    Args:
        x: An input of the function.
        function: At the top level of a module: it is compiled once.
        is_dynamic: Whether to compile for all sizes; None: for the first ones, and for all once they change.
    """
    if x.is_cuda:
        return _compiled(function, is_dynamic)
    return function
