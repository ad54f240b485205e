"""Metrics of train steps: weighted means, perplexity, and the argmax over a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """Weighted mean; NaN if the weights sum to 0. NaN values are not dropped."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        """Create the sums of weighted values and of weights."""
        super().__init__()
        self.add_state(
            "total",
            torch.zeros((), dtype=torch.float64),
            dist_reduce_fx="sum",
        )
        self.add_state(
            "weight",
            torch.zeros((), dtype=torch.float64),
            dist_reduce_fx="sum",
        )

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add values and their weights, both of the same shape."""
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, []."""
        return self.total / self.weight


class Perplexity(WeightedMean):
    """exp of the weighted mean loss of tokens."""

    def compute(self) -> Tensor:
        """Return the perplexity, []."""
        return torch.exp(super().compute())


def vocab_parallel_argmax(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Argmax over the vocabulary; of several largest logits the first, as ``argmax`` of the full logits.

    Collective over ``tp_group``: two all-reduces of one value per position.

    Args:
        logits: [..., v/tp], this rank's shard; vocabulary padding is -inf.
        tp_group: The tensor-parallel group.

    Returns:
        Token ids, [...] int64, the same on every rank of the group.
    """
    largest, token = logits.float().max(dim=-1)
    token = token + dist.get_rank(tp_group) * logits.shape[-1]
    if dist.get_world_size(tp_group) == 1:
        return token
    shard_largest = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    is_smaller = shard_largest < largest
    token = token.masked_fill(is_smaller, torch.iinfo(token.dtype).max)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    return token
