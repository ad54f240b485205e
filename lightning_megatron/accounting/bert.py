"""What do the heads of a BERT cost, in parameters and in operations? Its layers are counted as any others."""

from __future__ import annotations

from lightning_megatron.models.config import ModelConfig


def bert_head_parameters(model: ModelConfig, vocab_rows: int) -> int:
    """Parameters after the final norm, but for the weight of the output layer.

    Args:
        model: Its shape and task.
        vocab_rows: Rows of the output layer's bias: the vocabulary, or one rank's part of it with its padding.
    """
    h = model.hidden_size
    count = 0
    if model.has_output_layer:
        count += _linear(h, h) + 2 * h + vocab_rows
    if model.has_pooler:
        count += _linear(h, h)
    if model.task == "pretraining":
        return count + _linear(h, 2)
    return count if model.has_output_layer else count + _linear(h, model.num_labels)


def bert_head_multiply_adds_per_token(model: ModelConfig, seq_length: int, padded_vocab_size: int) -> float:
    """Multiply-adds of the head for one token; what happens once per row is spread over its tokens."""
    h = model.hidden_size
    count = 0.0
    if model.has_output_layer:
        count += h * h + h * padded_vocab_size
    if model.has_pooler:
        count += h * h / seq_length
    if model.task == "pretraining":
        return count + 2 * h / seq_length
    if model.task == "sequence_classification":
        return count + h * model.num_labels / seq_length
    return count if model.has_output_layer else count + h * model.num_labels


def _linear(rows: int, columns: int) -> int:
    return rows * columns + columns
