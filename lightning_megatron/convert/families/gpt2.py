"""GPT-2 (Radford et al. 2019): learned absolute positions, LayerNorm before each block, a tied output layer."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.convert.rules import LAYER, Rule, qkv_order
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


def _rules(model: ModelConfig) -> list[Rule]:
    layer, hf = "decoder.layers.", f"transformer.h.{LAYER}."
    qkv = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=("transformer.wte.weight",)),
        Rule(megatron="embedding.position_embeddings.weight", hugging_face=("transformer.wpe.weight",)),
        Rule(megatron="decoder.final_layernorm.weight", hugging_face=("transformer.ln_f.weight",)),
        Rule(megatron="decoder.final_layernorm.bias", hugging_face=("transformer.ln_f.bias",)),
        Rule(megatron=layer + "self_attention.linear_qkv.layer_norm_weight", hugging_face=(hf + "ln_1.weight",)),
        Rule(megatron=layer + "self_attention.linear_qkv.layer_norm_bias", hugging_face=(hf + "ln_1.bias",)),
        Rule(
            megatron=layer + "self_attention.linear_qkv.weight",
            hugging_face=(hf + "attn.c_attn.weight",),
            order=qkv,
            transposed=True,
        ),
        Rule(megatron=layer + "self_attention.linear_qkv.bias", hugging_face=(hf + "attn.c_attn.bias",), order=qkv),
        Rule(megatron=layer + "mlp.linear_fc1.layer_norm_weight", hugging_face=(hf + "ln_2.weight",)),
        Rule(megatron=layer + "mlp.linear_fc1.layer_norm_bias", hugging_face=(hf + "ln_2.bias",)),
    ]
    for ours, theirs in (
        ("self_attention.linear_proj", "attn.c_proj"),
        ("mlp.linear_fc1", "mlp.c_fc"),
        ("mlp.linear_fc2", "mlp.c_proj"),
    ):
        rules += [
            Rule(megatron=f"{layer}{ours}.weight", hugging_face=(f"{hf}{theirs}.weight",), transposed=True),
            Rule(megatron=f"{layer}{ours}.bias", hugging_face=(f"{hf}{theirs}.bias",)),
        ]
    if not model.share_embeddings_and_output_weights:
        rules.append(Rule(megatron="output_layer.weight", hugging_face=("lm_head.weight",)))
    return rules


FAMILY = Family(
    model_type="gpt2",
    describe=_describe,
    rules=_rules,
    architectures={"causal_lm": "GPT2LMHeadModel"},
    base_prefix="transformer.",
    buffers=("*.attn.bias", "*.attn.masked_bias"),
    required={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
)
