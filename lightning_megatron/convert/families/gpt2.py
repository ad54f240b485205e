"""GPT-2 (Radford et al. 2019): learned absolute positions, LayerNorm before each block, a tied output layer."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.gpt_tables import GPT2_NAMES, absolute_positions, fused_rules, gpt2_config
from lightning_megatron.convert.rules import Rule, qkv_order
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return gpt2_config(hf, "gpt2")


def _rules(model: ModelConfig) -> list[Rule]:
    order = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)
    return fused_rules(GPT2_NAMES, model, order, transposed=True) + absolute_positions("transformer.wpe")


FAMILY = Family(
    model_type="gpt2",
    describe=_describe,
    rules=_rules,
    architectures={"causal_lm": "GPT2LMHeadModel"},
    base_prefix="transformer.",
    buffers=("*.attn.bias", "*.attn.masked_bias"),
    # reorder_and_upcast_attn changes the rounding of 16-bit scores only, and ours are added in float32.
    required={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
)
