"""What does a BERT's chunk say of rows? What its Hugging Face model says, whole on every tensor-parallel rank."""

from __future__ import annotations

from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from lightning_megatron.models.bert import BertChunk


def output_of_bert(
    model: BertChunk, tokens: Tensor, positions: Tensor | None, mask: Tensor | None, token_types: Tensor | None
) -> Tensor:
    """Hidden states [s, b, h] or, of the last chunk, the logits of its head; all tensor-parallel ranks must call.

    Args:
        model: A plain chunk, whose input is set.
        tokens: [b, s], int64.
        positions: [b, s], int64; None for 0, 1, 2, ...
        mask: [b, s], 0 for padding; None for no padding.
        token_types: [b, s], int64; None for 0 everywhere.

    Returns:
        At the end [b, s, padded vocabulary], [b, num_labels] or [b, s, num_labels]; of a model of pretraining the
        first, without the logits of the order of sentences.
    """
    # In training padding sees padding. Hugging Face lets it see the tokens, and its logits are asked for, too.
    hidden_keys = None if mask is None else (mask == 0)[:, None, None, :]
    output = model(tokens, positions, hidden_keys, token_types)
    if not isinstance(output, tuple):
        states_or_logits: Tensor = output
        return states_or_logits
    logits: Tensor = gather_from_tensor_model_parallel_region(output[0])
    return logits
