"""Vocabulary-parallel cross-entropy, over a vocabulary that is padded to a multiple of tp.

It saves the logits themselves for the backward pass instead of a float32 softmax: per logit the forward pass reads 2
bytes, the backward pass reads 2 and writes 2 (``triton/cross_entropy.py``; on a CPU the functions below). liger-kernel
0.8 and megatron-core 0.16.1 move 22 and more, and save 4 bytes per logit.

megatron-core 0.16.1 has three more faults here. Vocabulary padding takes part in the softmax, so the loss is not that
of the Hugging Face model: models mask it in their logits (models/gpt.py). The fused variant casts its gradient to
bfloat16 whatever the dtype of the logits (fusions/fused_cross_entropy.py). And an ignored label has a gradient unless
the caller masks its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A vocabulary shard's statistics per token: largest logit, sum of exp(logit - largest), and the label's logit.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], token ids of the full vocabulary.
        first: Token id of the shard's first column.

    Returns:
        Three tensors [s, b], float32; the last is 0 where the label is in another shard.
    """
    width = logits.shape[-1]
    scores = logits.float()
    # A shard of only padding is all -inf, and -inf - (-inf) is NaN.
    smallest = torch.finfo(torch.float32).min
    largest = scores.amax(-1).clamp(min=smallest)
    relative = scores - largest.unsqueeze(-1)
    total = relative.exp().sum(-1)
    column = labels - first
    index = column.clamp(0, width - 1).unsqueeze(-1)
    own = logits.gather(-1, index).squeeze(-1)
    is_here = (column >= 0) & (column < width)
    return largest, total, torch.where(is_here, own.float(), 0.0)


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    first: int,
    log_sum: Tensor,
    upstream: Tensor,
) -> Tensor:
    """Gradient of the logits, (softmax - one-hot) * upstream: [s, b, v/tp], in the logits' dtype.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], token ids of the full vocabulary.
        first: Token id of the shard's first column.
        log_sum: [s, b], float32: log-sum-exp of the logits over the full vocabulary.
        upstream: [s, b], gradients of the token losses.
    """
    softmax = (logits.float() - log_sum.unsqueeze(-1)).exp()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    one_hot = (columns == (labels - first).unsqueeze(-1)).float()
    gradient = (softmax - one_hot) * upstream.float().unsqueeze(-1)
    return gradient.to(logits.dtype)


def _functions_for(
    logits: Tensor,
) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    """The two functions above, or the kernels that do the same on a GPU."""
    if logits.is_cuda:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton import cross_entropy

        return cross_entropy.row_statistics, cross_entropy.logits_gradient
    return row_statistics, logits_gradient


class VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy of each token over a vocabulary that is sharded over a TP group; collective over it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        tp_group: Any,
    ) -> Tensor:
        """Losses [s, b], float32, of logits [s, b, v/tp] and labels [s, b]."""
        ctx.first = dist.get_rank(tp_group) * logits.shape[-1]
        statistics, _ = _functions_for(logits)
        largest, total, own = statistics(logits, labels, ctx.first)
        if dist.get_world_size(tp_group) > 1:
            largest_of_shard = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
            rescaled = total * (largest_of_shard - largest).exp()
            sums = torch.stack([rescaled, own])
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
        _, differentiate = _functions_for(logits)
        gradient = differentiate(logits, labels, ctx.first, log_sum, upstream[0])
        return gradient, None, None


def token_losses(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """Cross-entropy of each token: [s, b], float32, the same on every TP rank.

    Args:
        logits: [s, b, v/tp]; may be overwritten.
        labels: [s, b], token ids; a negative label has the loss 0 and no gradient.
        tp_group: The TP group.
    """
    losses: Tensor = VocabParallelLoss.apply(logits, labels, tp_group)  # type: ignore[no-untyped-call]
    return losses.masked_fill(labels < 0, 0.0)


def language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """``LanguageModule.compute_language_model_loss``: losses [b, s] of labels [b, s] and logits [s, b, v/tp]."""
    loss = token_losses(
        logits,
        labels.transpose(0, 1).contiguous(),
        self.pg_collection.tp,
    )
    return loss.transpose(0, 1).contiguous()
