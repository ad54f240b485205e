"""Options of a router, which its torch form (``router.py``) and its Triton kernel share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen."""

    topk: int
    is_sigmoid: bool
    """Scores are sigmoids of the logits; otherwise their softmax."""
    is_normalized: bool
    """The chosen scores are divided by their sum."""
    min_sum: float
    """Smallest sum by which they are divided."""
    scale: float
    """Factor of all probabilities."""
