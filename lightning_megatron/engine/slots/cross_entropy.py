"""What does a token cost? Cross-entropy over a vocabulary that is split over TP and padded to a multiple of it.

Three things are wrong with megatron-core 0.16.1 here. The rows that pad the vocabulary take part in the softmax, so the
loss is not that of the Hugging Face model: ``hide_padded_vocab_`` is for a model to call on its logits. The fused
variant casts its gradient to bfloat16 whatever the logits are (fusions/fused_cross_entropy.py). And a label that is not
to be counted has a gradient unless the caller masks its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_megatron.engine.patching import Patch
from lightning_megatron.engine.slots.compiled_loss import compiled_loss


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


def token_losses(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """Cross-entropy of each token: [s, b], float32, the same on every TP rank.

    Args:
        logits: [s, b, v/tp]; may be overwritten.
        labels: [s, b], token numbers; a negative label costs 0 and has no gradient.
        tp_group: The TP group.
    """
    return compiled_loss(logits, labels, tp_group).masked_fill(labels < 0, 0.0)


def _loss_method(original: Any) -> Callable[[Any, Tensor, Tensor], Tensor]:
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [b, s] of labels [b, s] and logits [s, b, v/tp]."""
        loss = token_losses(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
        return loss.transpose(0, 1).contiguous()

    return compute_language_model_loss


CROSS_ENTROPY_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.models.common.language_module.language_module",
        attribute="LanguageModule.compute_language_model_loss",
        replacement=_loss_method,
        engine="megatron-core 0.16.1",
        reason="it reads the logits often, its fused gradient is always bfloat16, ignored labels have a gradient",
    ),
)
