"""Qwen 3 (Yang et al. 2025): Llama that normalizes each head's queries and keys, with heads of any width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.gpt_tables import llama_config, llama_family, window_fields
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(
        llama_config(hf, "qwen3"),
        add_qkv_bias=hf.attention_bias,
        add_attention_output_bias=hf.attention_bias,
        qk_layernorm=True,
        **window_fields(hf),
    )


FAMILY = llama_family("qwen3", "Qwen3ForCausalLM", _describe)
