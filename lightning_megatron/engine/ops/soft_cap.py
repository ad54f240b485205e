"""Soft caps: values bounded smoothly by cap * tanh(x / cap), as attention scores and logits of Gemma 2.

Bello et al. 2016 (arXiv 1611.09940), section 5; Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    capped = torch.tanh(x.float() / cap) * cap
    return capped.to(x.dtype)


def _soft_cap_gradient(x: Tensor, upstream: Tensor, cap: float) -> Tensor:
    slope = 1.0 - torch.tanh(x.float() / cap).square()
    return (upstream.float() * slope).to(x.dtype)


class _SoftCap(torch.autograd.Function):
    """Saves its input, not its output, which is overwritten to mask the logits of vocabulary padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        capped: Tensor = compiled_for(x, _soft_cap)(x, cap)
        return capped

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        differentiate = compiled_for(x, _soft_cap_gradient)
        return differentiate(x, upstream[0], ctx.cap), None


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Soft-cap ``x``: ``cap * tanh(x / cap)``, in its shape and dtype, computed in float32."""
    capped: Tensor = _SoftCap.apply(x, cap)  # type: ignore[no-untyped-call]
    return capped
