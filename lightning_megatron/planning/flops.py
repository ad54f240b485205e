"""Model FLOPs: pure arithmetic on a model's shape.

Model FLOPs count a multiply-add as two operations and the backward pass as twice the forward pass. Recomputed
activations, embedding lookups, norms, softmax and the optimizer are not counted.

Sources: Megatron-LM core_v0.16.1, training.py, ``num_floating_point_operations`` (causal attention counted half, padded
vocabulary); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, equation 3, which counts full attention and a
second forward pass: without the latter it is ``72 B s L h^2 (1 + s / (6 h) + V / (12 L h))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planning.parameters import (
    active_adapter_parameters,
    attention_weights,
    head_linears,
    mlp_matrices,
)

AttentionCount = Literal["causal", "full"]
"""Whether the masked half of a causal attention matrix is left out or counted (``full``); both are published."""

_PRODUCTS_WITH_STATE = 3
"""Products of a token with the state of linear attention: k S, k v^T and q S."""


def forward_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """FLOPs of the forward pass for one row, over all ranks.

    With q = heads x head size and k = v = key/value groups x head size, the multiply-adds of a row of s tokens are
    ``s * (L * (h * (q + k + v) + q * h + h * ffn * (3 if gated else 2) + q * s * (1 if causal else 2)) + h * V)``; a
    layer with a sliding window of w < s tokens has ``w * (1 - w / (2 s))`` (or w) keys in place of s / 2 (or s).
    Those of a T5 for s_e encoder and s_d decoder tokens are ``L_e * s_e * (4 h q + mlp + 2 q s_e)
    + L_d * (s_d * (6 h q + mlp + q s_d + 2 q s_e) + 2 s_e h q) + s_d * h * V``. Of experts,
    only the active ones and the router are counted. In latent attention the projections are those of its latents,
    and values may be narrower than keys. In linear attention the products with the state are those of the recurrence:
    each token multiplies each head's state, [keys, values], with its key and with its query, and adds a product of the
    same size; chunks, by which they are computed, have more. The convolution is counted, too.

    Args:
        model: Model config.
        lengths: Tokens of the row; for a T5 those of the encoder and of the decoder.
        padded_vocab_size: Rows V of the output layer, padding included; see ``ModelConfig.padded_vocab_size``.
        attention: ``causal`` counts the unmasked keys, s / 2 per query on average; ``full`` all s, or the whole window.
            For a BERT and a T5's encoder, which have no causal mask, both count all keys.
    """
    stack = 0.0
    for layer in range(model.num_layers + model.num_decoder_layers):
        linears, scores = layer_flops(model, lengths, layer, attention)
        stack += linears + scores
    return stack + head_flops(model, lengths, padded_vocab_size)


def layer_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    layer: int,
    attention: AttentionCount = "causal",
) -> tuple[float, float]:
    """FLOPs of one layer's forward pass for one row: those of linears, and those of attention scores and values.

    Args:
        model: Model config.
        lengths: As for ``forward_flops``.
        layer: Index of the layer from 0, a T5's decoder after its encoder.
        attention: As for ``forward_flops``.
    """
    h = model.hidden_size
    q = model.num_attention_heads * model.kv_channels
    v = model.num_attention_heads * model.value_width
    mlp = h * model.mlp_width(layer) * mlp_matrices(model)
    if model.experts is not None and model.has_experts(layer):
        experts = model.experts
        has_gate = experts.shared_ffn_hidden_size > 0 and experts.has_shared_gate
        mlp += h * (experts.num_experts + has_gate)
    is_decoder = layer >= model.num_layers
    s = lengths[-1] if is_decoder else lengths[0]
    keys: float = s
    if model.architecture != "t5":
        keys = _keys_per_query(model, layer, s, attention)
    elif is_decoder and attention == "causal":
        keys = s / 2
    products = s * (attention_weights(model, layer) + mlp)
    scores = s * (q + v) * keys
    if model.has_linear_attention(layer):
        assert model.linear_attention is not None
        linear = model.linear_attention
        products += s * linear.conv_size * linear.conv_kernel_dim
        scores = s * _PRODUCTS_WITH_STATE * linear.state_size
    if is_decoder:
        # Cross-attention: queries and outputs of decoder tokens, keys and values of encoder tokens.
        products += (s + lengths[0]) * 2 * h * q
        scores += 2 * s * q * lengths[0]
    return 2.0 * products, 2.0 * scores


def head_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    padded_vocab_size: int,
) -> float:
    """FLOPs of the head (all after the last layer) in the forward pass for one row."""
    linears = head_linears(model, padded_vocab_size, lengths[-1])
    return 2.0 * sum(math.prod(linear) for linear in linears)


def model_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """FLOPs of training (forward and backward pass) for one row, over all ranks; arguments as for ``forward_flops``.

    For each matrix product of the forward pass the backward pass has two, for the gradients of input and weight; the
    frozen weights of a model with LoRA have no weight gradient. Of adapters of experts, the active ones are counted.
    """
    flops = 3 * forward_flops(model, lengths, padded_vocab_size, attention)
    if model.lora is None:
        return flops
    frozen = 0.0
    for layer in range(model.num_layers + model.num_decoder_layers):
        linears, _ = layer_flops(model, lengths, layer, attention)
        frozen += linears
    frozen += head_flops(model, lengths, padded_vocab_size)
    if model.trains_head_with_lora:
        # The last linear; a pooler before it is frozen.
        frozen -= 2.0 * math.prod(head_linears(model, padded_vocab_size, lengths[-1])[-1])
    return flops - frozen + 6.0 * active_adapter_parameters(model) * lengths[-1]


def _keys_per_query(
    model: ModelConfig,
    layer: int,
    seq_length: int,
    attention: AttentionCount,
) -> float:
    """Mean number of keys per query that one layer attends to."""
    window = seq_length
    if model.has_window(layer):
        window = min(seq_length, model.sliding_window or seq_length)
    if attention == "full" or model.architecture == "bert":
        return window
    # The first ``window`` queries see a growing number of keys, later ones ``window`` keys.
    return window * (1 - window / (2 * seq_length))
