"""How are segments attended to where FlexAttention does not serve: with dropout, or in short rows? Run by run, on CUDA.

Tokens of one segment that lie side by side are a sequence of its own to FlashAttention's kernel for sequences of
different lengths, which then needs no mask (Dao 2023, https://arxiv.org/abs/2307.08691). A dense mask takes twice as
long, as it takes another kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.engine.slots.attention_masks import Pattern


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where the runs of equal segment numbers are in a batch of rows that lie one after the other."""

    bounds: Tensor
    """Their beginnings and the end of the last: [runs + 1], int32."""
    longest: int
    """Tokens of the longest."""


def runs_of(segments: Tensor) -> Runs | None:
    """The runs of [b, s] segment numbers; None if a segment is in several pieces, which would have to see each other.

    Padding (0) may be in pieces: what it sees does not matter. The host waits for the numbers, once for each mask.
    """
    rows, length = segments.shape
    numbers = segments.cpu()
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    row, column = begins.nonzero(as_tuple=True)
    of_tokens = numbers[row, column] != 0
    pairs = torch.stack((row, numbers[row, column]), dim=1)[of_tokens]
    if len(torch.unique(pairs, dim=0)) < len(pairs):
        return None
    bounds = torch.cat((row * length + column, torch.tensor([rows * length]))).int()
    return Runs(bounds=bounds.to(segments.device, non_blocking=True), longest=int(bounds.diff().max()))


def can_attend(q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """Whether the kernel takes these queries and keys ([b, np, s, hn]) and hides what ``pattern`` says."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] == k.shape[2]
        and not pattern.cross
        and pattern.window is None
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 256
        and _has_kernels(q.device)
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def attend(q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, causal: bool, dropout: float, scale: float | None) -> Tensor:
    """Weighted sums of the values: [b, np, s, hn].

    Args:
        q: [b, np, s, hn].
        k: [b, ng, s, hn].
        v: [b, ng, s, hn].
        runs: What sees each other.
        causal: Whether a query sees no later key.
        dropout: Probability with which a weight is dropped.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """
    b, np, s, hn = q.shape
    if (repeats := np // k.shape[1]) > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    packed = [x.transpose(1, 2).reshape(b * s, np, hn) for x in (q, k, v)]
    # torch's own operator below scaled_dot_product_attention, which has no argument for sequences in one batch.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *packed, runs.bounds, runs.bounds, runs.longest, runs.longest, dropout, causal, False, scale=scale
    )[0]
    return out.view(b, s, np, hn).transpose(1, 2)
