"""Which token does the model find most likely, where the vocabulary is split over TP? Nothing of its size is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def predicted_tokens(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """The token with the largest logit, of several the first, as ``argmax`` over the whole vocabulary finds it.

    Every rank of ``tp_group`` must call; two numbers a position travel.

    Args:
        logits: [..., v/tp], this rank's shard; padding of the vocabulary is -inf.
        tp_group: The TP group.

    Returns:
        [...], int64, the same on every rank of the group.
    """
    largest, token = logits.float().max(dim=-1)
    token = token + dist.get_rank(tp_group) * logits.shape[-1]
    if dist.get_world_size(tp_group) == 1:
        return token
    largest_of_shard = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    token = token.masked_fill(largest_of_shard < largest, torch.iinfo(token.dtype).max)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    return token
