"""Vocab-parallel cross-entropy by torch.compile, over a vocabulary that is padded to a multiple of tp.

It keeps the logits themselves for the backward pass instead of a float32 softmax: per logit 4 bytes are read going
forward (the second time mostly from the cache), 2 read and 2 written going back. liger-kernel 0.8 and megatron-core
0.16.1 move 22 and more, and keep 4 bytes per logit.

Three more things are wrong with megatron-core 0.16.1 here. The rows that pad the vocabulary take part in the softmax,
so the loss is not that of the Hugging Face model: models hide them in their logits (``models/gpt.py``). The
fused variant casts its gradient to bfloat16 whatever the logits are (fusions/fused_cross_entropy.py). And a label that
is not to be counted has a gradient unless the caller masks its loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def row_statistics(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a shard knows of each token: the largest logit, the sum of exp(logit - largest), the label's logit.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], numbers of the whole vocabulary.
        first: Number of the shard's first column.

    Returns:
        Three times [s, b], float32; the last is 0 where the label is in another shard.
    """
    width = logits.shape[-1]
    scores = logits.float()
    # A shard of nothing but padding is all -inf, and -inf - (-inf) is NaN.
    largest = scores.amax(-1).clamp(min=torch.finfo(torch.float32).min)
    total = (scores - largest.unsqueeze(-1)).exp().sum(-1)
    column = labels - first
    own = logits.gather(-1, column.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1).float()
    return largest, total, torch.where((column >= 0) & (column < width), own, 0.0)


def logits_gradient(logits: Tensor, labels: Tensor, first: int, log_sum: Tensor, upstream: Tensor) -> Tensor:
    """(softmax - one-hot) * upstream: [s, b, v/tp], in the logits' dtype.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], numbers of the whole vocabulary.
        first: Number of the shard's first column.
        log_sum: [s, b], float32: the logarithm of the softmax's denominator, over the whole vocabulary.
        upstream: [s, b], gradient of the loss of each token.
    """
    softmax = (logits.float() - log_sum.unsqueeze(-1)).exp()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    one_hot = (columns == (labels - first).unsqueeze(-1)).float()
    return ((softmax - one_hot) * upstream.float().unsqueeze(-1)).to(logits.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    """Compiled once per process; on a GPU the eager form would write several float32 copies of the logits."""
    return torch.compile(function)


def compiled_for(logits: Tensor, function: Any) -> Any:
    """``function``, as one kernel where ``logits`` are on a GPU."""
    return _compiled(function) if logits.is_cuda else function


class VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy of each token over a vocabulary that is split over a TP group; every rank of it must call."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
        """Losses [s, b], float32, of logits [s, b, v/tp] and labels [s, b]."""
        ctx.first = dist.get_rank(tp_group) * logits.shape[-1]
        largest, total, own = compiled_for(logits, row_statistics)(logits, labels, ctx.first)
        if dist.get_world_size(tp_group) > 1:
            largest_of_shard = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
            sums = torch.stack([total * (largest_of_shard - largest).exp(), own])
            dist.all_reduce(sums, group=tp_group)
            total, own = sums.unbind()
        log_sum = largest + total.log()
        ctx.save_for_backward(logits, labels, log_sum)
        loss: Tensor = log_sum - own
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the logits; no communication."""
        logits, labels, log_sum = ctx.saved_tensors
        gradient = compiled_for(logits, logits_gradient)(logits, labels, ctx.first, log_sum, upstream[0])
        return gradient, None, None


def token_losses(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """Cross-entropy of each token: [s, b], float32, the same on every TP rank.

    Args:
        logits: [s, b, v/tp]; may be overwritten.
        labels: [s, b], token numbers; a negative label costs 0 and has no gradient.
        tp_group: The TP group.
    """
    losses: Tensor = VocabParallelLoss.apply(logits, labels, tp_group)  # type: ignore[no-untyped-call]
    return losses.masked_fill(labels < 0, 0.0)


def loss_method(original: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """``LanguageModule.compute_language_model_loss`` by ``token_losses``."""

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [b, s] of labels [b, s] and logits [s, b, v/tp]."""
        loss = token_losses(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss


# ---- soft caps -------------------------------------------------------------------------------------------------------
# Numbers between two soft bounds, cap * tanh(x / cap): scores of attention and logits of Gemma 2. Bello et al. 2016
# (arXiv 1611.09940), section 5; Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.


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
