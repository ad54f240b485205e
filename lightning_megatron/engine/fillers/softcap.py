"""Numbers between two soft bounds, cap * tanh(x / cap): scores of attention and logits of Gemma 2.

Source: Bello et al. 2016 (arXiv 1611.09940), section 5; Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.

No kernel of torch's scaled_dot_product_attention caps scores. On CUDA FlexAttention does (``attention.py``) where it
can be used; anywhere else, and for one query per row, ``attend_capped`` writes the scores to memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.engine.fillers.loss import compiled_for


def _capped(x: Tensor, cap: float) -> Tensor:
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


def _gradient(x: Tensor, upstream: Tensor, cap: float) -> Tensor:
    return (upstream.float() * (1.0 - torch.tanh(x.float() / cap).square())).to(x.dtype)


class _SoftCap(torch.autograd.Function):
    """Keeps its input, not its output: the logits of padding are hidden by overwriting the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        capped: Tensor = compiled_for(x, _capped)(x, cap)
        return capped

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return compiled_for(x, _gradient)(x, upstream[0], ctx.cap), None


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``, of ``x``'s shape and dtype, computed in float32."""
    capped: Tensor = _SoftCap.apply(x, cap)  # type: ignore[no-untyped-call]
    return capped


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, dropout: float, scale: float | None, cap: float
) -> Tensor:
    """Weighted sums of the values, whose scores are capped before masks hide keys: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        added: To the capped scores, [b or 1, np or 1, sq or 1, sk]; None where no key is hidden.
        dropout: Probability with which a weight is dropped.
        scale: What scores are multiplied by; None for 1 / sqrt(hn).
        cap: Of the scores.
    """
    rows, heads, queries, width = q.shape
    grouped = (rows, k.shape[1], -1, width)  # the heads of a group are queries of one head, and no key is copied
    products = torch.matmul(q.reshape(grouped), k.transpose(2, 3)) * (width**-0.5 if scale is None else scale)
    scores = soft_capped(products.view(rows, heads, queries, -1), cap)
    weights = torch.softmax(scores if added is None else scores + added, dim=-1, dtype=torch.float32).to(v.dtype)
    dropped = F.dropout(weights, dropout) if dropout > 0.0 else weights
    return torch.matmul(dropped.view(*products.shape), v).view(q.shape)
