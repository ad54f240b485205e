"""Which metrics does torchmetrics not have in the form that a step needs?"""

from __future__ import annotations

import torch
from torchmetrics import Metric


class Perplexity(Metric):
    """exp of the mean loss over all tokens with a weight."""

    total: torch.Tensor
    weight: torch.Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Take in tokens: losses and weights, both [b, s]."""
        self.total += (losses * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> torch.Tensor:
        """[]: the perplexity."""
        return torch.exp(self.total / self.weight)


class Fraction(Metric):
    """How many of the rows that count are right; exact for any number of rows."""

    right: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.add_state("right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, is_right: torch.Tensor, counted: torch.Tensor) -> None:
        """Take in rows: whether each is right, and whether it counts; both [b], bool."""
        self.right += (is_right & counted).sum()
        self.rows += counted.sum()

    def compute(self) -> torch.Tensor:
        """[]: between 0 and 1; NaN if no row counts."""
        return self.right.double() / self.rows
