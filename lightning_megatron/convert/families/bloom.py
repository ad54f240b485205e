"""Bloom (Le Scao et al. 2022): ALiBi instead of positions, and a LayerNorm on the embeddings."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family, Rule
from lightning_megatron.convert.gpt_tables import FusedNames, fused_rules, norm
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    if hf.slow_but_exact and hf.pretraining_tp > 1:
        raise ConfigError(
            f"slow_but_exact=True with pretraining_tp={hf.pretraining_tp} is not supported: Hugging Face then leaves "
            "out the biases of the output projections; use slow_but_exact=False"
        )
    return ModelConfig(
        family="bloom",
        num_layers=hf.n_layer,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=4 * hf.hidden_size,
        num_attention_heads=hf.n_head,
        num_query_groups=hf.n_head,
        kv_channels=hf.hidden_size // hf.n_head,
        vocab_size=hf.vocab_size,
        # Of the training; nothing in the model ends there.
        max_position_embeddings=getattr(hf, "seq_length", 2048),
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation="gelu_tanh",
        embedding_layernorm=True,
        position_embedding_type="alibi",
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        hidden_dropout=hf.hidden_dropout,
        attention_dropout=hf.attention_dropout,
        init_method_std=hf.initializer_range,
        scaled_residual_init=False,
    )


def _rules(model: ModelConfig) -> list[Rule]:
    # query_key_value is in Megatron's order: each head's query, key and value.
    return fused_rules(FusedNames(), model) + norm("embedding.norm.", "transformer.word_embeddings_layernorm", model)


FAMILIES = (
    Family(
        model_type="bloom",
        describe=_describe,
        rules=_rules,
        architectures={"causal_lm": "BloomForCausalLM"},
        base_prefix="transformer.",
        required={"apply_residual_connection_post_layernorm": (False,)},
    ),
)
