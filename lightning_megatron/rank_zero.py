"""Warnings and lines of rank 0, also where Lightning is not imported.

lightning_utilities 0.15, core/rank_zero.py, raises until somebody has set the rank, which importing Lightning does.
Commands read checkpoints and prompts before that, or never import it.
"""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_info", "rank_zero_warn"]

_NAMES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables with the rank, the first of which counts, as in Lightning 2.6, fabric/utilities/rank_zero.py."""

if not hasattr(rank_zero_only, "rank"):
    rank_zero_only.rank = next(  # type: ignore[attr-defined]
        (int(os.environ[name]) for name in _NAMES if name in os.environ), 0
    )
