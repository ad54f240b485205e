"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions, grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.gpt_tables import llama_config, llama_rules
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(
        llama_config(hf, "llama"),
        add_bias_linear=hf.mlp_bias,
        add_qkv_bias=hf.attention_bias,
        add_attention_output_bias=hf.attention_bias,
    )


FAMILY = Family(
    model_type="llama",
    describe=_describe,
    required={"pretraining_tp": (1, None)},
    rules=llama_rules,
    architectures={"causal_lm": "LlamaForCausalLM"},
    base_prefix="model.",
    buffers=("*.rotary_emb.inv_freq",),
)
