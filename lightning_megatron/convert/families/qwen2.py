"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values, and windows in the later layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.gpt_tables import llama_config, llama_family, window_fields
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(llama_config(hf, "qwen2"), add_qkv_bias=True, **window_fields(hf))


FAMILY = llama_family("qwen2", "Qwen2ForCausalLM", _describe)
