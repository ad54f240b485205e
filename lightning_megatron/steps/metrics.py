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
