"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions, grouped queries."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.convert.rules import LAYER, Rule, qkv_order
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope_type={kind!r} of this llama config is not supported; use 'default' or 'llama3'")
    return RopeScaling(
        rope_type="llama3",
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


def _rules(model: ModelConfig) -> list[Rule]:
    layer, hf = "decoder.layers.", f"model.layers.{LAYER}."
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
    qkv = qkv_order(heads, groups, width)
    rows = (heads * width, groups * width, groups * width)
    projections = tuple(f"{hf}self_attn.{name}_proj" for name in "qkv")
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=("model.embed_tokens.weight",)),
        Rule(megatron="decoder.final_layernorm.weight", hugging_face=("model.norm.weight",)),
        Rule(
            megatron=layer + "self_attention.linear_qkv.layer_norm_weight",
            hugging_face=(hf + "input_layernorm.weight",),
        ),
        Rule(
            megatron=layer + "self_attention.linear_qkv.weight",
            hugging_face=tuple(f"{name}.weight" for name in projections),
            rows=rows,
            order=qkv,
        ),
        Rule(megatron=layer + "self_attention.linear_proj.weight", hugging_face=(hf + "self_attn.o_proj.weight",)),
        Rule(
            megatron=layer + "mlp.linear_fc1.layer_norm_weight", hugging_face=(hf + "post_attention_layernorm.weight",)
        ),
        Rule(
            megatron=layer + "mlp.linear_fc1.weight",
            hugging_face=(hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"),
            rows=(model.ffn_hidden_size, model.ffn_hidden_size),
        ),
        Rule(megatron=layer + "mlp.linear_fc2.weight", hugging_face=(hf + "mlp.down_proj.weight",)),
    ]
    if model.add_qkv_bias:
        rules.append(
            Rule(
                megatron=layer + "self_attention.linear_qkv.bias",
                hugging_face=tuple(f"{name}.bias" for name in projections),
                rows=rows,
                order=qkv,
            )
        )
    if model.add_bias_linear:
        rules += [
            Rule(megatron=layer + "self_attention.linear_proj.bias", hugging_face=(hf + "self_attn.o_proj.bias",)),
            Rule(
                megatron=layer + "mlp.linear_fc1.bias",
                hugging_face=(hf + "mlp.gate_proj.bias", hf + "mlp.up_proj.bias"),
                rows=(model.ffn_hidden_size, model.ffn_hidden_size),
            ),
            Rule(megatron=layer + "mlp.linear_fc2.bias", hugging_face=(hf + "mlp.down_proj.bias",)),
        ]
    if not model.share_embeddings_and_output_weights:
        rules.append(Rule(megatron="output_layer.weight", hugging_face=("lm_head.weight",)))
    return rules


FAMILY = Family(
    model_type="llama",
    describe=_describe,
    required={"pretraining_tp": (1,)},
    rules=_rules,
    architectures={"causal_lm": "LlamaForCausalLM"},
    base_prefix="model.",
    buffers=("*.rotary_emb.inv_freq",),
)
