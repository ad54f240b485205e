"""GPT-2 (Radford et al. 2019): learned absolute positions, LayerNorm before each block, a tied output layer."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        ffn_hidden_size=hf.n_inner or 4 * hf.n_embd,
        num_attention_heads=hf.n_head,
        num_query_groups=hf.n_head,
        kv_channels=hf.n_embd // hf.n_head,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.n_positions,
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation=activation(hf.activation_function),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        embedding_dropout=hf.embd_pdrop,
        hidden_dropout=hf.resid_pdrop,
        attention_dropout=hf.attn_pdrop,
        init_method_std=hf.initializer_range,
    )


FAMILY = Family(
    model_type="gpt2",
    describe=_describe,
    required={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)
