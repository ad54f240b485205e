"""Mistral (Jiang et al. 2023): Llama whose tokens see the last ``sliding_window`` tokens only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.gpt_tables import llama_config, llama_family
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    return replace(llama_config(hf, "mistral"), sliding_window=hf.sliding_window)


FAMILY = llama_family("mistral", "MistralForCausalLM", _describe)
