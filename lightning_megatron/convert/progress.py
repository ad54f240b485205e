"""Progress of loading and saving weights."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tqdm import tqdm

_MIN_BAR_BYTES = 10**9
"""Smaller models load and save too fast for a progress bar to be of use."""


def weights_progress(what: str, total_bytes: int) -> tqdm[Any]:
    """Progress bar on rank 0, shown for large models only and only if standard error is a terminal."""
    is_hidden = dist.get_rank() != 0 or total_bytes < _MIN_BAR_BYTES
    return tqdm(
        desc=what,
        total=total_bytes,
        unit="B",
        unit_scale=True,
        disable=True if is_hidden else None,  # None hides it unless standard error is a terminal
    )
