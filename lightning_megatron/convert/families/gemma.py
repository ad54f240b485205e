"""Gemma: norms multiply by 1 + weight, embeddings are multiplied by sqrt(hidden_size), heads are wide.

Gemma (Gemma Team 2024, arXiv 2403.08295). Gemma 2 (arXiv 2408.00118): norms behind blocks, too, soft caps on scores and
logits, windows in every other layer. Gemma 3 (arXiv 2503.19786), its language model: normalized queries and keys
instead of the scores' cap, five layers of six with windows and with a theta of their own.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import activation
from lightning_megatron.convert.gpt_tables import (
    LLAMA,
    DecoderNames,
    decoder,
    described,
    read_rope,
    rope_fields,
    windows,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _described(hf: Any, own: dict[str, Any]) -> ModelConfig:
    biases = {"add_qkv_bias": hf.attention_bias, "add_attention_output_bias": hf.attention_bias}
    return described(
        hf, {**LLAMA, "zero_centered_norms": True, "embedding_multiplier": hf.hidden_size**0.5, **biases, **own}
    )


def _gemma(hf: Any) -> ModelConfig:
    # transformers takes hidden_act, whatever an old hidden_activation beside it says.
    return _described(hf, rope_fields(hf))


def _of_two_norms(hf: Any) -> dict[str, Any]:
    return {
        "activation": activation(hf.hidden_activation),
        "post_norms": True,
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
        "logits_softcap": hf.final_logit_softcapping,
        **windows(hf),
    }


def _gemma2(hf: Any) -> ModelConfig:
    own = {**_of_two_norms(hf), **rope_fields(hf), "attention_softcap": hf.attn_logit_softcapping}
    return _described(hf, own)


def _gemma3(hf: Any) -> ModelConfig:
    of_windows, scaled = read_rope(hf.rope_parameters["sliding_attention"], hf.max_position_embeddings)
    base, scaling = read_rope(hf.rope_parameters["full_attention"], hf.max_position_embeddings)
    if scaled is not None or (scaling is not None and scaling.attention_factor != 1.0):
        kind = "sliding_attention" if scaled is not None else "full_attention"
        raise ConfigError(
            f"rope_parameters of {kind}: expected 'default' (or for full_attention 'linear' or another without an "
            f"attention factor), got {hf.rope_parameters[kind]['rope_type']!r}; use one of those"
        )
    rope = {"rotary_base": base, "rope_scaling": scaling, "rotary_base_of_windows": of_windows}
    own = {**_of_two_norms(hf), "position_embedding_type": "rope", **rope, "qk_layernorm": True}
    return _described(hf, own)


_NAMES = DecoderNames(mlp_norm="pre_feedforward_layernorm")

FAMILIES = (
    decoder("gemma", "GemmaForCausalLM", _gemma, required={"use_bidirectional_attention": (None, False)}),
    decoder("gemma2", "Gemma2ForCausalLM", _gemma2, _NAMES, {"use_bidirectional_attention": (None, False)}),
    decoder(
        *("gemma3_text", "Gemma3ForCausalLM", _gemma3, _NAMES),
        # Hugging Face's Gemma 3 does not read attn_logit_softcapping.
        required={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    ),
)
