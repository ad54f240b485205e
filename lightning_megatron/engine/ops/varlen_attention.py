"""Variable-length FlashAttention: attention within the runs of equal segments of packed rows.

Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.engine.ops.flex_attention import has_kernels
from lightning_megatron.engine.ops.masks import Pattern
from lightning_megatron.engine.ops.narrow_values import padded_values


class SegmentRuns(NamedTuple):
    """Runs of equal segment ids in the concatenated rows of a batch, as FlashAttention's sequences."""

    cu_seqlens: Tensor
    """Beginnings of the runs and the end of the last: [runs + 1], int32."""
    max_seqlen: int
    """Length of the longest run."""


def segment_runs(segments: Tensor) -> SegmentRuns | None:
    """Runs of equal segment ids in [b, s] segments; None if a segment has several runs, which would see each other.

    Padding (0) may have several runs: what it sees does not matter. Synchronizes with the device, once for each mask.
    """
    rows, length = segments.shape
    ids = segments.cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    segment = ids[row, column]
    pairs = torch.stack((row, segment), dim=1)[segment != 0]
    if len(torch.unique(pairs, dim=0)) < len(pairs):
        return None
    end = torch.tensor([rows * length])
    bounds = torch.cat((row * length + column, end)).int()
    return SegmentRuns(
        cu_seqlens=bounds.to(segments.device, non_blocking=True),
        max_seqlen=int(bounds.diff().max()),
    )


def can_use_varlen(q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """Whether variable-length FlashAttention supports these queries and keys ([b, np, s, hn]) and ``pattern``."""
    width = q.shape[3]
    is_supported_width = width % 8 == 0 and width <= 256
    is_square = q.shape[2] == k.shape[2] and not pattern.cross
    return has_kernels(q) and is_square and pattern.window is None and is_supported_width


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: SegmentRuns,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention within each run by variable-length FlashAttention: [b, np, s, hv].

    Args:
        q: [b, np, s, hn].
        k: [b, ng, s, hn].
        v: [b, ng, s, hv].
        runs: Tokens that see each other.
        causal: Whether later keys are hidden from a query.
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    b, np, s, hn = q.shape
    repeats = np // k.shape[1]
    if repeats > 1:
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    width = v.shape[3]
    v = padded_values(v, hn)
    packed = [x.transpose(1, 2).reshape(b * s, np, hn) for x in (q, k, v)]
    # The operator beneath torch's scaled_dot_product_attention, which itself does not take sequence lengths.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *packed,
        runs.cu_seqlens,
        runs.cu_seqlens,
        runs.max_seqlen,
        runs.max_seqlen,
        dropout,
        causal,
        False,
        scale=scale,
    )[0]
    return out.view(b, s, np, hn).transpose(1, 2)[..., :width]
