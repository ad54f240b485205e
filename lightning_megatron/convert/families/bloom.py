"""Bloom (Le Scao et al. 2022): ALiBi instead of positions, and a LayerNorm on the embeddings."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.gpt_tables import DecoderNames, decoder, described
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

NAMES = DecoderNames(
    base="transformer.",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    layer="h.{layer}.",
    qkv=("self_attention.query_key_value",),
    is_in_megatrons_order=True,
    proj="self_attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
)
"""Falcon's, too."""


def _describe(hf: Any) -> ModelConfig:
    if hf.slow_but_exact and hf.pretraining_tp > 1:
        raise ConfigError(
            f"slow_but_exact=True with pretraining_tp={hf.pretraining_tp} is not supported: Hugging Face then leaves "
            "out the biases of the output projections; use slow_but_exact=False"
        )
    own = {
        "ffn_hidden_size": 4 * hf.hidden_size,
        "num_query_groups": hf.n_head,
        # Of the training; nothing in the model ends there.
        "max_position_embeddings": getattr(hf, "seq_length", 2048),
        "layernorm_epsilon": hf.layer_norm_epsilon,
        "activation": "gelu_tanh",
        "embedding_layernorm": True,
        "position_embedding_type": "alibi",
        "hidden_dropout": hf.hidden_dropout,
    }
    return described(hf, own)


FAMILIES = (
    decoder(
        *("bloom", "BloomForCausalLM", _describe, NAMES),
        required={"apply_residual_connection_post_layernorm": (False,)},
    ),
)
