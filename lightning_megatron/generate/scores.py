"""Scores of target tokens under a language model: log-probabilities, and whether greedy decoding would choose them.

The output layer runs at the positions of targets only, and its logits stay sharded over the vocabulary: ranks of the tp
group exchange a few numbers per position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.generate.layout import NO_TARGET

_NO_TOKEN = torch.iinfo(torch.int64).max
"""Larger than every token id."""


class ScoredPositions:
    """The positions of one pass at which targets are scored, and what the output layer says about these."""

    def __init__(self, targets: Tensor) -> None:
        """Set the targets.

        Args:
            targets: [b, t, 2], as in ``ModelInputs``.
        """
        self._shape = targets.shape
        positions, tokens = targets.unbind(-1)
        self._is_target = tokens != NO_TARGET
        rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(positions)
        places = torch.stack((positions[self._is_target], rows[self._is_target]))
        # Several targets may follow the same position: answers of one token to the same question.
        self._places, self._place_of = places.unique(dim=1, return_inverse=True)
        self._tokens = tokens[self._is_target]

    def select(self, _: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook of the output layer: from its input, [s, b, h], keep the n scored positions, [n, 1, h]."""
        hidden = inputs[0]
        positions, rows = self._places
        return (hidden[positions, rows][:, None], *inputs[1:])

    def scores(self, logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        """Log-probability of each target, and 1 if no token is more likely, else 0: [b, t, 2] fp32, 0 elsewhere.

        Collective over the tp group.

        Args:
            logits: [1, n, v/tp], of the positions that ``select`` kept.
            tp_group: The TP group.
        """
        shard = logits[0].float()
        first = dist.get_rank(tp_group) * shard.shape[-1]
        log_sum, likeliest = _statistics(shard, first, tp_group)
        column = self._tokens - first
        is_here = (column >= 0) & (column < shard.shape[-1])
        own = shard[self._place_of, column.clamp(0, shard.shape[-1] - 1)]
        own = own.masked_fill(~is_here, 0.0)
        if dist.get_world_size(tp_group) > 1:
            dist.all_reduce(own, group=tp_group)
        is_greedy = likeliest[self._place_of] == self._tokens
        found = torch.stack((own - log_sum[self._place_of], is_greedy.float()), dim=-1)
        scores = found.new_zeros(self._shape)
        scores[self._is_target] = found
        return scores


def _statistics(
    shard: Tensor,
    first: int,
    tp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the logits and the likeliest token, the first of several equal ones, per position: [n] each.

    Args:
        shard: [n, v/tp], fp32.
        first: Token id of the shard's first column.
        tp_group: The TP group.
    """
    log_sum = shard.logsumexp(-1)
    largest, column = shard.max(-1)
    token = column + first
    if dist.get_world_size(tp_group) == 1:
        return log_sum, token
    largest_of_all = largest.clone()
    dist.all_reduce(largest_of_all, op=dist.ReduceOp.MAX, group=tp_group)
    token = token.masked_fill(largest < largest_of_all, _NO_TOKEN)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    # A shard of only padding has the sum 0 there.
    total = (log_sum - largest_of_all).exp()
    dist.all_reduce(total, group=tp_group)
    return largest_of_all + total.log(), token
