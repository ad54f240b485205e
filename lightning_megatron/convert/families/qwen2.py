"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values, and windows in the later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.gpt_tables import llama_config, llama_rules, window_fields
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(llama_config(hf, "qwen2"), add_qkv_bias=True, **window_fields(hf))


FAMILY = Family(
    model_type="qwen2",
    describe=_describe,
    required={},
    rules=llama_rules,
    architectures={"causal_lm": "Qwen2ForCausalLM"},
    base_prefix="model.",
    buffers=("*.rotary_emb.inv_freq",),
)
