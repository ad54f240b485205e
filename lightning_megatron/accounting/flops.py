"""How many floating-point operations does training on one token take?

Model FLOPs: what the mathematics needs, one multiply-add being two operations, the backward pass twice the forward
pass. Recomputed activations do not count, nor do embedding lookups, norms, softmax and the optimizer.

Sources: Megatron-LM core_v0.16.1, training.py, ``num_floating_point_operations`` (causal attention counted half, padded
vocabulary); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, equation 3, which counts full attention and a
second forward pass: without the latter it is ``72 B s L h^2 (1 + s / (6 h) + V / (12 L h))``.
"""

from __future__ import annotations

from typing import Literal

from lightning_megatron.accounting.bert import bert_head_multiply_adds_per_token
from lightning_megatron.models.config import ModelConfig

AttentionCount = Literal["causal", "full"]
"""Whether the half of the attention matrix that a causal mask removes counts. Published figures use either."""

TRAINING_OVER_FORWARD = 3
"""For each product of the forward pass the backward pass has two: the gradients of the input and of the weight."""


def forward_flops_per_token(
    model: ModelConfig, seq_length: int, padded_vocab_size: int, attention: AttentionCount = "causal"
) -> float:
    """Operations of the forward pass on one token, over all ranks.

    With q = heads x head width and k = v = key/value groups x head width, a token's multiply-adds are
    ``L * (h * (q + k + v) + q * h + h * ffn * (3 if gated else 2) + q * s * (1 if causal else 2)) + h * V``; a layer
    with a sliding window of w < s tokens has ``w * (1 - w / (2 s))`` (or w) keys in the place of s / 2 (or s).

    Args:
        model: Its shape.
        seq_length: Tokens s of one sequence.
        padded_vocab_size: Rows V of the output layer that is really computed, see ``ModelConfig.padded_vocab_size``.
        attention: ``causal`` counts the keys that a query sees, on average s / 2, ``full`` all s, or its whole window.
            The queries of a BERT see all keys, and count so either way.
    """
    h = model.hidden_size
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    projections = h * (q + 2 * kv) + q * h
    mlp = h * model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
    keys = sum(_keys_per_query(model, layer, seq_length, attention) for layer in range(model.num_layers))
    scores_and_values = 2 * q * keys
    head: float = h * padded_vocab_size
    if model.architecture == "bert":
        head = bert_head_multiply_adds_per_token(model, seq_length, padded_vocab_size)
    return 2.0 * (model.num_layers * (projections + mlp) + scores_and_values + head)


def _keys_per_query(model: ModelConfig, layer: int, seq_length: int, attention: AttentionCount) -> float:
    """How many keys a query of one layer sees, on average over the sequence."""
    is_windowed = model.sliding_window_layers is None or layer in model.sliding_window_layers
    window = min(seq_length, model.sliding_window or seq_length) if is_windowed else seq_length
    if attention == "full" or model.architecture == "bert":
        return window
    # A triangle of the first ``window`` queries, then rows of ``window`` keys.
    return window * (1 - window / (2 * seq_length))


def model_flops_per_token(
    model: ModelConfig, seq_length: int, padded_vocab_size: int, attention: AttentionCount = "causal"
) -> float:
    """Operations of training (forward and backward pass) on one token, over all ranks.

    Args:
        model: Its shape.
        seq_length: Tokens of one sequence.
        padded_vocab_size: Rows of the output layer that is really computed.
        attention: Whether causal attention counts half; say which when you publish a figure.
    """
    return TRAINING_OVER_FORWARD * forward_flops_per_token(model, seq_length, padded_vocab_size, attention)


def model_flops_per_step(
    model: ModelConfig,
    seq_length: int,
    global_batch_size: int,
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """Operations of one optimizer step over all ranks.

    Args:
        model: Its shape.
        seq_length: Tokens of one sequence.
        global_batch_size: Sequences of one optimizer step over all data-parallel ranks.
        padded_vocab_size: Rows of the output layer that is really computed.
        attention: Whether causal attention counts half.
    """
    tokens = global_batch_size * seq_length
    return tokens * model_flops_per_token(model, seq_length, padded_vocab_size, attention)
