"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions, grouped queries."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope_type={kind!r} of this llama config is not supported; use 'default' or 'llama3'")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def _describe(hf: Any) -> ModelConfig:
    if hf.attention_bias != hf.mlp_bias:
        raise ConfigError(
            f"attention_bias={hf.attention_bias} with mlp_bias={hf.mlp_bias} is not supported: one switch "
            "of the engine sets the biases of the output projection and of the MLP; use the same value for both"
        )
    rope = dict(hf.rope_parameters)
    return ModelConfig(
        family="llama",
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation=activation(hf.hidden_act),
        gated_linear_unit=True,
        add_bias_linear=hf.mlp_bias,
        add_qkv_bias=hf.attention_bias,
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        attention_dropout=hf.attention_dropout,
        init_method_std=hf.initializer_range,
        scaled_residual_init=False,
    )


FAMILY = Family(model_type="llama", describe=_describe, required={"pretraining_tp": (1,)})
