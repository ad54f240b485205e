"""Llama and what has its names: RMSNorm, a gated MLP, rotary positions, grouped queries.

Llama (Touvron et al. 2023; Grattafiori et al. 2024). Mistral (Jiang et al. 2023): tokens see the last
``sliding_window`` tokens only. Qwen 2 and 2.5 (Yang et al. 2024): biases on queries, keys and values, and windows in
the later layers. Qwen 3 (Yang et al. 2025): each head's queries and keys are normalized, and heads have any width.
Granite 3 (IBM 2024): embeddings, scores, residuals and logits are multiplied. SmolLM 3 (Bakouch et al. 2025): every
fourth layer has no positions. OLMo 2 (Walsh et al. 2024): what blocks return is normalized, not what they read, and
queries and keys over all heads. Phi-3 and Phi-4 (Abdin et al. 2024): fused matrices. GLM-4 (GLM Team 2024): half of
each head is rotated, neighbours in pairs; the one of 2025 has norms behind blocks, too.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.gpt_tables import LLAMA, DecoderNames, decoder, described, rope_fields, windows
from lightning_megatron.models.config import ModelConfig


def _attention_biases(hf: Any) -> dict[str, Any]:
    return {"add_qkv_bias": hf.attention_bias, "add_attention_output_bias": hf.attention_bias}


def _llama(hf: Any) -> ModelConfig:
    return described(hf, {**LLAMA, **rope_fields(hf), **_attention_biases(hf), "add_bias_linear": hf.mlp_bias})


def _mistral(hf: Any) -> ModelConfig:
    return described(hf, {**LLAMA, **rope_fields(hf), "sliding_window": hf.sliding_window})


def _qwen2(hf: Any) -> ModelConfig:
    return described(hf, {**LLAMA, **rope_fields(hf), "add_qkv_bias": True, **windows(hf)})


def _qwen3(hf: Any) -> ModelConfig:
    return described(hf, {**LLAMA, **rope_fields(hf), **_attention_biases(hf), "qk_layernorm": True, **windows(hf)})


def _granite(hf: Any) -> ModelConfig:
    multipliers = {
        "softmax_scale": float(hf.attention_multiplier),
        "embedding_multiplier": float(hf.embedding_multiplier),
        "residual_multiplier": float(hf.residual_multiplier),
        "logits_multiplier": 1.0 / hf.logits_scaling,
    }
    biases = {**_attention_biases(hf), "add_bias_linear": hf.mlp_bias}
    return described(hf, {**LLAMA, **rope_fields(hf), **biases, **multipliers})


def _smollm3(hf: Any) -> ModelConfig:
    own = {**_attention_biases(hf), "add_bias_linear": hf.mlp_bias}
    own["no_rope_layers"] = tuple(i for i in range(hf.num_hidden_layers) if not hf.no_rope_layers[i])
    return described(hf, {**LLAMA, **rope_fields(hf), **own, **(windows(hf) if hf.use_sliding_window else {})})


def _olmo2(hf: Any) -> ModelConfig:
    norms = {"pre_norms": False, "post_norms": True, "qk_layernorm": True, "qk_layernorm_of_all_heads": True}
    return described(hf, {**LLAMA, **rope_fields(hf), **_attention_biases(hf), **norms})


def _phi3(hf: Any) -> ModelConfig:
    own = {"hidden_dropout": hf.resid_pdrop, "sliding_window": hf.sliding_window}
    return described(hf, {**LLAMA, **rope_fields(hf, may_be_partial=True), **own})


def _glm(hf: Any) -> ModelConfig:
    own = {"add_qkv_bias": hf.attention_bias, "rotary_interleaved": True, "post_norms": hf.model_type == "glm4"}
    return described(hf, {**LLAMA, **rope_fields(hf, may_be_partial=True), **own})


_GLM = DecoderNames(
    fc1=("mlp.gate_up_proj",), post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
)

FAMILIES = (
    decoder("llama", "LlamaForCausalLM", _llama, required={"pretraining_tp": (1, None)}),
    decoder("mistral", "MistralForCausalLM", _mistral),
    decoder("qwen2", "Qwen2ForCausalLM", _qwen2),
    decoder("qwen3", "Qwen3ForCausalLM", _qwen3),
    decoder("granite", "GraniteForCausalLM", _granite),
    decoder("smollm3", "SmolLM3ForCausalLM", _smollm3),
    decoder("olmo2", "Olmo2ForCausalLM", _olmo2),
    decoder("phi3", "Phi3ForCausalLM", _phi3, DecoderNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",))),
    decoder("glm", "GlmForCausalLM", _glm, _GLM),
    decoder("glm4", "Glm4ForCausalLM", _glm, _GLM),
)
