"""Bytes of activations and logits.

Activation memory follows Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4, adapted to this
package's layers (no attention matrix is stored).
"""

from __future__ import annotations

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layout import comm_type_of
from lightning_megatron.planning.parameters import latent_sizes
from lightning_megatron.planning.run import PlannedRun

_LOSS_BYTES = 4.5
"""Bytes allocated per logit of the cross-entropy, gradient included."""


def num_logits(run: PlannedRun, pp_rank: int) -> float:
    """Number of logits of a microbatch on one rank; 0 except on the last stage."""
    parallel = run.parallel
    model = run.model
    if pp_rank < parallel.pp - 1 or not model.has_output_layer:
        return 0.0
    padded = model.padded_vocab_size(parallel.tp)
    return run.micro_batch_size * run.lengths[-1] * padded / (parallel.tp * parallel.cp)


def logits_bytes(run: PlannedRun, pp_rank: int) -> float:
    """Bytes of the logits and their gradients."""
    return _LOSS_BYTES * run.bytes_per_element / 2 * num_logits(run, pp_rank)


def ranks_per_token(run: PlannedRun) -> float:
    """Expected number of ranks of its ep group to which a token is dispatched, with balanced experts."""
    assert run.model.experts is not None
    return run.parallel.ep * (1 - (1 - 1 / run.parallel.ep) ** run.model.experts.topk)


def layer_bytes(
    run: PlannedRun,
    layer: int,
    *,
    recompute: bool = False,
) -> float:
    """Bytes of activations that a layer stores for one microbatch; norms and activations excluded with ``recompute``.

    Per token, in bf16 and before any split over tp: residual stream and norms 8 h, projections 2 (q + k + v), rotated
    queries or T5's copy 2 q, attention output 2 v, MLP 4 f (gated 6 f), 2 h for each expert that the token is routed
    to, and one byte per element with dropout. In latent attention 4 for each number of its latents, which are split
    over tp as the residual stream is. Linear attention in place of attention: see ``_linear_attention_bytes``.
    """
    model = run.model
    parallel = run.parallel
    is_decoder = layer >= model.num_layers
    h = model.hidden_size
    f = model.mlp_width(layer)
    q = model.num_attention_heads * model.kv_channels
    v = model.num_attention_heads * model.value_width
    kv = model.num_query_groups * (model.kv_channels + model.value_width)
    topk = 0
    received = 0.0
    if model.experts is not None and model.has_experts(layer):
        topk = model.experts.topk
        if parallel.ep > 1:
            received = ranks_per_token(run)
    mlp = (6 if model.gated_linear_unit else 4) * f
    gates = 4 * q * model.attention_output_gate  # and the output before it is multiplied
    size = 8.0 * h + 2 * (q + kv) + 2 * v + gates + mlp + 2.0 * h * topk
    latents = 0
    if model.has_linear_attention(layer):
        size = 8.0 * h + _linear_attention_bytes(model) + mlp + 2.0 * h * topk
    elif model.latent_attention is not None:
        # Before and after norms; and the expanded keys, from which those with positions are made.
        latents = 4 * sum(latent_sizes(model))
        size += 2 * model.num_attention_heads * model.latent_attention.qk_head_dim
    elif model.position_embedding_type == "rope":
        size += 2 * q
    size += 2 * h * (model.hidden_dropout > 0) + f * (model.activation_dropout > 0)
    norms = 2
    if is_decoder:
        norms = 3
        encoder_ratio = run.lengths[0] / run.lengths[-1]
        size += 4.0 * h + 4 * q + 2 * kv * encoder_ratio + h * (model.hidden_dropout > 0)
    split = size - 4.0 * norms * h
    stream = 4.0 * norms * h + latents
    if recompute:
        # Inputs of experts that were received from other ranks are not recomputed.
        split -= 2.0 * f + 2.0 * h * (topk - received)
        stream = 2.0 * norms * h + latents
    if parallel.sequence_parallel:
        stream /= parallel.tp
    size = split / parallel.tp + stream
    if parallel.cp > 1 and comm_type_of(model, parallel) == "all_gather":
        # Keys and values of all tokens.
        size += (parallel.cp - 1) * 2.0 * kv / parallel.tp
    tokens = run.micro_batch_size * run.lengths[-1 if is_decoder else 0]
    return tokens * size * run.bytes_per_element / 2 / parallel.cp


_CHUNK = 64
"""Tokens of a chunk of the gated delta rule: ``engine/ops/gated_delta_rule.py``, which imports torch."""


def _linear_attention_bytes(model: ModelConfig) -> float:
    """Bytes that linear attention stores of a token in bf16, counted: its inputs, and those of all matrix products.

    Per value head: queries and keys, written and read, in seven forms, values in six, three matrices of a chunk's
    tokens in bf16 and two in fp32, and of each chunk a transition and a state.
    """
    linear = model.linear_attention
    assert linear is not None
    key = linear.key_head_dim
    value = linear.value_head_dim
    of_head = 2.0 * (7 * key + 6 * value) + (3 * 2 + 2 * 4) * _CHUNK
    of_head += 2 * key * (key + value) / _CHUNK
    return 2.0 * (sum(linear.sizes) + linear.conv_size) + linear.num_value_heads * of_head
