"""Split-K attention for one query per row, in generation (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

SPLIT_SIZE = 128
"""Minimum keys of a split, which the memory-efficient kernel reads at once."""


def num_key_splits(q: Tensor, k: Tensor) -> int:
    """Number of equal splits of the keys; 1 on the CPU, without a gain, or for shapes that the kernel does not support.

    Args:
        q: [b, ng, repeats, hn].
        k: [b, ng, sk, hn].
    """
    rows, groups, keys, width = k.shape
    if not q.is_cuda or width % 8 or keys % SPLIT_SIZE:
        return 1
    device = torch.cuda.get_device_properties(q.device)
    max_splits = device.multi_processor_count // (rows * groups)
    blocks = keys // SPLIT_SIZE
    choices = range(1, max(max_splits, 1) + 1)
    return max(splits for splits in choices if blocks % splits == 0)


def attend_split_k(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor,
    splits: int,
    scale: float | None,
) -> Tensor:
    """Attention over splits of the keys, combined by their log-sum-exps: [b, ng, repeats, hv].

    Args:
        q: [b, ng, repeats, hn], the queries that share keys.
        k: [b, ng, sk, hn]; ``splits`` divides sk.
        v: [b, ng, sk, hv].
        added: Additive mask, [b or 1, ng or 1, repeats or 1, sk], with finite values in each split.
        splits: Number of splits.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    rows, groups, repeats, _ = q.shape
    keys = k.unflatten(2, (splits, -1)).flatten(0, 1)
    values = v.unflatten(2, (splits, -1)).flatten(0, 1)
    queries = q.flatten(0, 1).unsqueeze(1)
    queries = queries.expand(-1, splits, -1, -1)
    added = added.unflatten(3, (splits, -1)).transpose(2, 3)
    added = added.expand(rows, groups, splits, repeats, -1)
    # The operator beneath torch's scaled_dot_product_attention, which itself does not return the log-sum-exps.
    outputs, log_sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries,
        keys,
        values,
        added.flatten(0, 1),
        True,
        scale=scale,
    )
    combined: Tensor = _compiled_combine()(outputs, log_sums)
    return combined.view(rows, groups, repeats, v.shape[3])


def _combine_splits(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """Combine outputs [n, splits, repeats, hn] by log-sum-exps [n, splits, >= repeats], fp32: [n, repeats, hn]."""
    weights = log_sums[:, :, : outputs.shape[2]].softmax(dim=1)
    combined = (outputs.float() * weights[..., None]).sum(dim=1)
    return combined.to(outputs.dtype)


@functools.cache
def _compiled_combine() -> Callable[[Tensor, Tensor], Tensor]:
    """``_combine_splits``, compiled once per process for all sizes: eagerly it is five kernels per layer."""
    return torch.compile(_combine_splits, dynamic=True)
