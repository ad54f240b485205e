"""GPT-BigCode (Allal et al. 2023, SantaCoder; Li et al. 2023, StarCoder): GPT-2 whose heads share one key and value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.gpt_tables import GPT2_NAMES, absolute_positions, fused_rules, gpt2_config
from lightning_megatron.convert.rules import Rule
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(gpt2_config(hf, "gpt_bigcode"), num_query_groups=1 if hf.multi_query else hf.n_head)


def _rules(model: ModelConfig) -> list[Rule]:
    # c_attn is in Megatron's order: all queries, the key, the value; or without multi_query each head's three.
    return fused_rules(GPT2_NAMES, model) + absolute_positions("transformer.wpe")


FAMILY = Family(
    model_type="gpt_bigcode",
    describe=_describe,
    rules=_rules,
    architectures={"causal_lm": "GPTBigCodeForCausalLM"},
    base_prefix="transformer.",
    buffers=("*.attn.bias", "*.attn.masked_bias"),
    # attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 are about rounding; our softmax is in float32.
    required={"add_cross_attention": (False,)},
)
