"""What does a token cost? Cross-entropy over a vocabulary that is split over TP and padded to a multiple of it.

Three things are wrong with megatron-core 0.16.1 here. The rows that pad the vocabulary take part in the softmax, so the
loss is not that of the Hugging Face model: ``hide_padded_vocab_`` is for a model to call on its logits. The fused
variant casts its gradient to bfloat16 whatever the logits are (fusions/fused_cross_entropy.py). And a label that is not
to be counted has a gradient unless the caller masks its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from lightning_megatron.engine.patching import Patch

PerTokenLoss = Callable[[Tensor, Tensor, Any], Tensor]
"""(logits [s, b, v/tp], labels [s, b], tp_group) -> loss [s, b], float32."""


def hide_padded_vocab_(logits: Tensor, vocab_size: int, tp_rank: int) -> Tensor:
    """Set the logits of padding rows to -inf in place: they never win and their gradient is exactly 0.

    Only the padded columns are touched, and autograd does not see it: nothing saves the logits, and the gradient of a
    softmax is 0 where the logit is -inf. With much padding a whole shard can be hidden; another rank has the maximum.

    Args:
        logits: [..., v/tp], the shard of rank ``tp_rank``; gathered logits are the shard of rank 0.
        vocab_size: Vocabulary without padding.
        tp_rank: Which shard this is.

    Returns:
        ``logits``.
    """
    width = logits.shape[-1]
    first_padding = max(0, vocab_size - tp_rank * width)
    if first_padding < width:
        logits.detach()[..., first_padding:].fill_(float("-inf"))
    return logits


def native_loss(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """The engine's cross-entropy, fused where its bfloat16 gradient is right."""
    if logits.is_cuda and logits.dtype == torch.bfloat16:
        loss: Tensor = fused_vocab_parallel_cross_entropy(logits, labels, tp_group)
    else:
        loss = vocab_parallel_cross_entropy(logits, labels)
    return loss


def liger_loss(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """liger-kernel's vocab-parallel cross-entropy (Triton, CUDA): float32 inside, gradient in the logits' dtype."""
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    loss: Tensor = LigerVocabParallelCEFunction.apply(logits, labels, tp_group, -100, 0.0, "megatron", "partition")
    return loss


def token_losses(logits: Tensor, labels: Tensor, tp_group: Any, per_token_loss: PerTokenLoss) -> Tensor:
    """Cross-entropy of each token: [s, b], float32, the same on every TP rank.

    Args:
        logits: [s, b, v/tp]; may be overwritten.
        labels: [s, b], token numbers; a negative label costs 0 and has no gradient.
        tp_group: The TP group.
        per_token_loss: Which implementation computes it.
    """
    return per_token_loss(logits, labels, tp_group).masked_fill(labels < 0, 0.0)


def _method(per_token_loss: PerTokenLoss) -> Callable[[Any], Callable[[Any, Tensor, Tensor], Tensor]]:
    def replacement(original: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
        def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
            """Losses [b, s] of labels [b, s] and logits [s, b, v/tp]."""
            loss = token_losses(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp, per_token_loss)
            return loss.transpose(0, 1).contiguous()

        return compute_language_model_loss

    return replacement


def cross_entropy_patches(per_token_loss: PerTokenLoss) -> tuple[Patch, ...]:
    """The loss of every language model of the engine, computed by ``per_token_loss``."""
    return (
        Patch(
            module="megatron.core.models.common.language_module.language_module",
            attribute="LanguageModule.compute_language_model_loss",
            replacement=_method(per_token_loss),
            engine="megatron-core 0.16.1",
            reason="the fused variant's gradient is always bfloat16, and ignored labels have a gradient",
        ),
    )
