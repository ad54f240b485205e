"""GPT-2 (Radford et al. 2019): learned absolute positions, LayerNorm before each block, a tied output layer.

And GPT-BigCode (Allal et al. 2023, SantaCoder; Li et al. 2023, StarCoder), whose heads share one key and value.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.convert.family import POSITIONS, Family, Rule, activation, qkv_order
from lightning_megatron.convert.gpt_tables import FusedNames, fused_rules, linear
from lightning_megatron.models.config import ModelConfig

_NAMES = FusedNames(
    embedding="transformer.wte",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    proj="attn.c_proj",
    fc1="mlp.c_fc",
    fc2="mlp.c_proj",
)


def _described(hf: Any, family: str, num_query_groups: int) -> ModelConfig:
    return ModelConfig(
        family=family,
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        ffn_hidden_size=4 * hf.n_embd if hf.n_inner is None else hf.n_inner,
        num_attention_heads=hf.n_head,
        num_query_groups=num_query_groups,
        kv_channels=hf.n_embd // hf.n_head,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.n_positions,
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation=activation(hf.activation_function),
        softmax_scale=None if hf.scale_attn_weights else 1.0,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        embedding_dropout=hf.embd_pdrop,
        hidden_dropout=hf.resid_pdrop,
        attention_dropout=hf.attn_pdrop,
        init_method_std=hf.initializer_range,
    )


def _gpt2(hf: Any) -> ModelConfig:
    return _described(hf, "gpt2", hf.n_head)


def _gpt_bigcode(hf: Any) -> ModelConfig:
    return _described(hf, "gpt_bigcode", 1 if hf.multi_query else hf.n_head)


def _gpt2_rules(model: ModelConfig) -> list[Rule]:
    order = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)
    return _rules(model, order, transposed=True)


def _rules(model: ModelConfig, order: torch.Tensor | None = None, *, transposed: bool = False) -> list[Rule]:
    # GPT-BigCode's c_attn is in Megatron's order: all queries, the key, the value; without multi_query each head's.
    positions = linear(POSITIONS.removesuffix(".weight"), ("transformer.wpe",))
    return fused_rules(_NAMES, model, order, transposed=transposed) + positions


FAMILIES = (
    Family(
        model_type="gpt2",
        describe=_gpt2,
        rules=_gpt2_rules,
        architectures={"causal_lm": "GPT2LMHeadModel"},
        base_prefix="transformer.",
        buffers=("*.attn.bias", "*.attn.masked_bias"),
        # reorder_and_upcast_attn changes the rounding of 16-bit scores only, and ours are added in float32.
        required={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    ),
    Family(
        model_type="gpt_bigcode",
        describe=_gpt_bigcode,
        rules=_rules,
        architectures={"causal_lm": "GPTBigCodeForCausalLM"},
        base_prefix="transformer.",
        buffers=("*.attn.bias", "*.attn.masked_bias"),
        # attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 are about rounding; our softmax is in float32.
        required={"add_cross_attention": (False,)},
    ),
)
