"""Functions of logits and scores that are compiled on a GPU and run eagerly on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _compiled(function: Any) -> Any:
    """Compile once per process; on a GPU the eager form would write several float32 copies of the logits."""
    return torch.compile(function)


def compiled_for(logits: Tensor, function: Any) -> Any:
    """``function``, compiled if ``logits`` are on a GPU."""
    if logits.is_cuda:
        return _compiled(function)
    return function
