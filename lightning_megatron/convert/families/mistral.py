"""Mistral (Jiang et al. 2023): Llama whose tokens see the last ``sliding_window`` tokens only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.gpt_tables import llama_config, llama_rules
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(llama_config(hf, "mistral"), sliding_window=hf.sliding_window)


FAMILY = Family(
    model_type="mistral",
    describe=_describe,
    required={},
    rules=llama_rules,
    architectures={"causal_lm": "MistralForCausalLM"},
    base_prefix="model.",
    buffers=("*.rotary_emb.inv_freq",),
)
