"""Llama and what has its names: RMSNorm, a gated MLP, rotary positions, grouped queries.

Llama (Touvron et al. 2023; Grattafiori et al. 2024). Mistral (Jiang et al. 2023): tokens see the last
``sliding_window`` tokens only. Qwen 2 and 2.5 (Yang et al. 2024): biases on queries, keys and values, and windows in
the later layers. Qwen 3 (Yang et al. 2025): each head's queries and keys are normalized, and heads have any width.
Granite 3 (IBM 2024): embeddings, scores, residuals and logits are multiplied. SmolLM 3 (Bakouch et al. 2025): every
fourth layer has no positions. OLMo 2 (Walsh et al. 2024): what blocks return is normalized, not what they read, and
queries and keys over all heads. Phi-3 and Phi-4 (Abdin et al. 2024): fused matrices. GLM-4 (GLM Team 2024): half of
each head is rotated, neighbours in pairs; the one of 2025 has norms behind blocks, too.

Gemma (Gemma Team 2024, arXiv 2403.08295): norms multiply by 1 + weight, embeddings are multiplied by
sqrt(hidden_size), heads are wide. Gemma 2 (arXiv 2408.00118): norms behind blocks, too, soft caps on scores and logits,
windows in every other layer. Gemma 3 (arXiv 2503.19786), its language model: normalized queries and keys instead of the
scores' cap, five layers of six with windows and with a theta of their own.

Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv 2401.04088): each MLP is eight, of which a token goes through
two. Qwen 2 MoE (Yang et al. 2024): many narrow experts, whose probabilities are not normalized, and one for all tokens.
Qwen 3 MoE (Yang et al. 2025): 128 experts, none for all. In both some layers may have an ordinary MLP. OLMoE
(Muennighoff et al. 2024, arXiv 2409.02060): 64 experts, and queries and keys are normalized over all heads.
``output_router_logits``, with which transformers adds the auxiliary loss, is not looked at: training here balances the
experts wherever ``router_aux_loss_coef`` is not 0.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_megatron.convert.family import (
    EXPERT,
    LAYER,
    LLAMA,
    LLAMA_NAMES,
    DecoderNames,
    Rule,
    activation,
    attention_biases,
    decoder,
    decoder_rules,
    described,
    linear,
    llama_like,
    norm,
    read_rope,
    rope_fields,
    windows,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Experts, ModelConfig


def _llama(hf: Any) -> ModelConfig:
    return llama_like(hf, {**attention_biases(hf), "add_bias_linear": hf.mlp_bias})


def _mistral(hf: Any) -> ModelConfig:
    return llama_like(hf, {"sliding_window": hf.sliding_window})


def _qwen2(hf: Any) -> ModelConfig:
    return llama_like(hf, {"add_qkv_bias": True, **windows(hf)})


def _qwen3(hf: Any) -> ModelConfig:
    return llama_like(hf, {**attention_biases(hf), "qk_layernorm": True, **windows(hf)})


def _granite(hf: Any) -> ModelConfig:
    multipliers = {
        "softmax_scale": float(hf.attention_multiplier),
        "embedding_multiplier": float(hf.embedding_multiplier),
        "residual_multiplier": float(hf.residual_multiplier),
        "logits_multiplier": 1.0 / hf.logits_scaling,
    }
    biases = {**attention_biases(hf), "add_bias_linear": hf.mlp_bias}
    return llama_like(hf, {**biases, **multipliers})


def _smollm3(hf: Any) -> ModelConfig:
    own = {**attention_biases(hf), "add_bias_linear": hf.mlp_bias}
    own["no_rope_layers"] = tuple(i for i in range(hf.num_hidden_layers) if not hf.no_rope_layers[i])
    return llama_like(hf, {**own, **(windows(hf) if hf.use_sliding_window else {})})


def _olmo2(hf: Any) -> ModelConfig:
    norms = {"pre_norms": False, "post_norms": True, "qk_layernorm": True, "qk_layernorm_of_all_heads": True}
    return llama_like(hf, {**attention_biases(hf), **norms})


def _phi3(hf: Any) -> ModelConfig:
    own = {"hidden_dropout": hf.resid_pdrop, "sliding_window": hf.sliding_window}
    return llama_like(hf, own, may_be_partial=True)


def _glm(hf: Any) -> ModelConfig:
    own = {"add_qkv_bias": hf.attention_bias, "rotary_interleaved": True, "post_norms": hf.model_type == "glm4"}
    return llama_like(hf, own, may_be_partial=True)


def _gemma_like(hf: Any, own: dict[str, Any]) -> ModelConfig:
    of_all = {"zero_centered_norms": True, "embedding_multiplier": hf.hidden_size**0.5}
    return described(hf, {**LLAMA, **of_all, **attention_biases(hf), **own})


def _gemma(hf: Any) -> ModelConfig:
    # transformers takes hidden_act, whatever an old hidden_activation beside it says.
    return _gemma_like(hf, rope_fields(hf))


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
    return _gemma_like(hf, own)


def _gemma3(hf: Any) -> ModelConfig:
    of_windows, scaled = read_rope(hf, hf.rope_parameters["sliding_attention"])
    base, scaling = read_rope(hf, hf.rope_parameters["full_attention"])
    if scaled is not None or (scaling is not None and scaling.attention_factor != 1.0):
        kind = "sliding_attention" if scaled is not None else "full_attention"
        raise ConfigError(
            f"rope_parameters of {kind}: expected 'default' (or for full_attention 'linear' or another without an "
            f"attention factor), got {hf.rope_parameters[kind]['rope_type']!r}; use one of those"
        )
    rope = {"rotary_base": base, "rope_scaling": scaling, "rotary_base_of_windows": of_windows}
    own = {**_of_two_norms(hf), "position_embedding_type": "rope", **rope, "qk_layernorm": True}
    return _gemma_like(hf, own)


_GEMMA = DecoderNames(mlp_norm="pre_feedforward_layernorm")
_GLM = DecoderNames(
    fc1=("mlp.gate_up_proj",), post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
)

# ---- mixtures of experts ---------------------------------------------------------------------------------------------

_LAYERS = "decoder.layers."
_EXPERTS, _SHARED = _LAYERS + "mlp.experts.experts.", _LAYERS + "mlp.shared_experts."


def _mixture(block: str, names: tuple[str, str, str], model: ModelConfig) -> list[Rule]:
    """All weights of a decoder some of whose MLPs are experts.

    Args:
        block: What Hugging Face calls the experts' layer.
        names: What it calls gate, up and down.
        model: The description.
    """
    experts, hf = model.experts, f"model.layers.{LAYER}."
    if experts is None:
        return decoder_rules(LLAMA_NAMES, model)
    gate, up, down = (f"{hf}{block}.experts.{EXPERT}.{name}" for name in names)
    rules = [
        *decoder_rules(LLAMA_NAMES, model),
        *norm(_LAYERS + "pre_mlp_layernorm.", hf + "post_attention_layernorm", model),
        *linear(_LAYERS + "mlp.router", (f"{hf}{block}.gate",)),
        *linear(_EXPERTS + "linear_fc1", (gate, up), rows=(experts.ffn_hidden_size,) * 2),
        *linear(_EXPERTS + "linear_fc2", (down,)),
    ]
    if width := experts.shared_ffn_hidden_size:
        shared = f"{hf}{block}.shared_expert"
        rules += linear(_SHARED + "linear_fc1", (f"{shared}.gate_proj", f"{shared}.up_proj"), rows=(width, width))
        rules += linear(_SHARED + "linear_fc2", (f"{shared}.down_proj",))
        rules.append(Rule(megatron=_SHARED + "gate_weight", hugging_face=(f"{shared}_gate.weight",)))
    return rules


def _experts(hf: Any, ffn_hidden_size: int, **own: Any) -> Experts:
    return Experts(
        num_experts=hf.num_experts,
        topk=hf.num_experts_per_tok,
        ffn_hidden_size=ffn_hidden_size,
        load_balancing_loss_coef=hf.router_aux_loss_coef,
        **own,
    )


def _qwen_experts(hf: Any, shared_ffn_hidden_size: int = 0) -> Experts | None:
    dense = tuple(
        layer
        for layer in range(hf.num_hidden_layers)
        if layer in hf.mlp_only_layers or (layer + 1) % hf.decoder_sparse_step != 0
    )
    if hf.num_experts == 0 or len(dense) == hf.num_hidden_layers:
        return None
    own = {"shared_ffn_hidden_size": shared_ffn_hidden_size, "dense_layers": dense}
    return _experts(hf, hf.moe_intermediate_size, normalizes_topk=hf.norm_topk_prob, **own)


def _mixtral(hf: Any) -> ModelConfig:
    return llama_like(hf, {"experts": _experts(hf, hf.intermediate_size), "sliding_window": hf.sliding_window})


def _qwen2_moe(hf: Any) -> ModelConfig:
    experts = _qwen_experts(hf, hf.shared_expert_intermediate_size)
    return llama_like(hf, {"experts": experts, "add_qkv_bias": hf.qkv_bias, **windows(hf)})


def _qwen3_moe(hf: Any) -> ModelConfig:
    own = {"qk_layernorm": True, "sliding_window": hf.sliding_window, **attention_biases(hf)}
    return llama_like(hf, {"experts": _qwen_experts(hf), **own})


def _olmoe(hf: Any) -> ModelConfig:
    experts = _experts(hf, hf.intermediate_size, normalizes_topk=hf.norm_topk_prob)
    own = {"qk_layernorm": True, "qk_layernorm_of_all_heads": True, **attention_biases(hf)}
    return llama_like(hf, {"experts": experts, **own})


_of_qwen = partial(_mixture, "mlp", ("gate_proj", "up_proj", "down_proj"))
_of_mixtral = partial(_mixture, "block_sparse_moe", ("w1", "w3", "w2"))


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
    decoder("gemma", "GemmaForCausalLM", _gemma, required={"use_bidirectional_attention": (None, False)}),
    decoder("gemma2", "Gemma2ForCausalLM", _gemma2, _GEMMA, {"use_bidirectional_attention": (None, False)}),
    decoder(
        *("gemma3_text", "Gemma3ForCausalLM", _gemma3, _GEMMA),
        # Hugging Face's Gemma 3 does not read attn_logit_softcapping.
        required={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    ),
    decoder("mixtral", "MixtralForCausalLM", _mixtral, required={"router_jitter_noise": (0.0,)}, rules=_of_mixtral),
    decoder("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, rules=_of_qwen),
    decoder("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, rules=_of_qwen),
    decoder("olmoe", "OlmoeForCausalLM", _olmoe, required={"clip_qkv": (None,)}, rules=_of_qwen),
)
