"""Falcon (Almazrouei et al. 2023): attention beside the MLP, few key/value heads, rotary positions or ALiBi."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.families.bloom import NAMES
from lightning_megatron.convert.family import Rule, activation
from lightning_megatron.convert.gpt_tables import decoder, decoder_rules, described, rope_fields
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _describe(hf: Any) -> ModelConfig:
    _check(hf)
    own = {
        "ffn_hidden_size": hf.ffn_hidden_size,
        "num_query_groups": _groups(hf),
        "layernorm_epsilon": hf.layer_norm_epsilon,
        "activation": activation(hf.activation),
        "add_bias_linear": bool(hf.bias),
        "add_qkv_bias": bool(hf.bias),
        "parallel_attention": bool(hf.parallel_attn),
        "parallel_attention_norms": (hf.num_ln_in_parallel_attn or 2) if hf.new_decoder_architecture else 1,
        "hidden_dropout": hf.hidden_dropout,
        # Hugging Face drops what attention returns with the probability for attention weights, unless the two blocks
        # are parallel, and attention weights with ALiBi only.
        "attention_output_dropout": None if hf.parallel_attn else hf.attention_dropout,
        "attention_dropout": hf.attention_dropout if hf.alibi else 0.0,
    }
    positions = {"position_embedding_type": "alibi", "alibi_scaled": True} if hf.alibi else rope_fields(hf)
    return described(hf, {**own, **positions})


def _groups(hf: Any) -> int:
    if hf.new_decoder_architecture:
        return int(hf.num_kv_heads)
    return 1 if hf.multi_query else int(hf.num_attention_heads)


def _check(hf: Any) -> None:
    """Refuse combinations for which Hugging Face's own model fails."""
    is_new = hf.new_decoder_architecture
    has_norms = hf.num_ln_in_parallel_attn in ((None, 1, 2) if is_new else (None, 1))
    has_keys = is_new or hf.multi_query or hf.num_kv_heads == hf.num_attention_heads
    if not (has_norms and has_keys and (hf.parallel_attn or not is_new)):
        raise ConfigError(
            f"new_decoder_architecture={is_new}: parallel_attn={hf.parallel_attn}, num_ln_in_parallel_attn="
            f"{hf.num_ln_in_parallel_attn} and num_kv_heads={hf.num_kv_heads} are not supported with it, nor computed "
            "by Hugging Face; leave them out"
        )


def _rules(model: ModelConfig) -> list[Rule]:
    has_two = model.parallel_attention and model.parallel_attention_norms == 2
    return decoder_rules(replace(NAMES, input_norm="ln_attn", mlp_norm="ln_mlp") if has_two else NAMES, model)


FAMILIES = (replace(decoder("falcon", "FalconForCausalLM", _describe, NAMES), rules=_rules),)
