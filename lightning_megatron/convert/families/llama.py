"""Llama (Touvron et al. 2023; Grattafiori et al. 2024): RMSNorm, SwiGLU, rotary positions, grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.gpt_tables import llama_config, llama_family
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(
        llama_config(hf, "llama"),
        add_bias_linear=hf.mlp_bias,
        add_qkv_bias=hf.attention_bias,
        add_attention_output_bias=hf.attention_bias,
    )


FAMILY = llama_family("llama", "LlamaForCausalLM", _describe, {"pretraining_tp": (1, None)})
