"""Llama and decoders with its weight names: RMSNorm, gated MLP, rotary embeddings, grouped-query attention.

Llama (Touvron et al. 2023; Grattafiori et al. 2024). Mistral (Jiang et al. 2023): sliding window attention. Qwen 2 and
2.5 (Yang et al. 2024): biases on queries, keys and values, and sliding windows in the later layers. Qwen 3 (Yang et al.
2025): QK norm per head, and any head_dim. Granite 3 (IBM 2024): multipliers of embeddings, scores, residuals and
logits. SmolLM 3 (Bakouch et al. 2025): no rotary embeddings in every fourth layer. OLMo 2 (Walsh et al. 2024): norms
after blocks instead of before, and QK norm over all heads. Phi-3 and Phi-4 (Abdin et al. 2024): fused QKV and gate-up
matrices. GLM-4 (GLM Team 2024): interleaved rotary embeddings on half of each head; the version of 2025 also has norms
after blocks.

Gemma (Gemma Team 2024, arXiv 2403.08295): norms multiply by 1 + weight, embeddings are multiplied by
sqrt(hidden_size), head_dim is large. Gemma 2 (arXiv 2408.00118): norms also after blocks, soft caps on scores and
logits, sliding windows in every other layer. Gemma 3 (arXiv 2503.19786), its language model: QK norm instead of the
cap on scores, sliding windows in five of six layers, which have a rotary base of their own.

Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv 2401.04088): eight experts, top-2. Qwen 2 MoE (Yang et al. 2024):
many small experts, whose top-k probabilities are not normalized, and a shared expert. Qwen 3 MoE (Yang et al. 2025):
128 experts, no shared one. In both some layers may have a dense MLP. OLMoE (Muennighoff et al. 2024, arXiv
2409.02060): 64 experts, and QK norm over all heads. ``output_router_logits``, with which transformers adds the
auxiliary loss, is ignored: training here adds the load balancing loss whenever ``router_aux_loss_coef`` is not 0.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.decoder_rules import DecoderNames
from lightning_megatron.convert.family import Family, causal_lm
from lightning_megatron.convert.model_fields import LLAMA, Fields, activation
from lightning_megatron.convert.rope import read_rope
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Experts


def _granite(hf: Any) -> Fields:
    return {"logits_multiplier": 1.0 / hf.logits_scaling}


def _smollm3(hf: Any) -> Fields:
    # transformers' masks use the windows of layer_types and ignore use_sliding_window.
    return {
        "no_rope_layers": tuple(i for i in range(hf.num_hidden_layers) if not hf.no_rope_layers[i])
    }


def _phi3(hf: Any) -> Fields:
    return {"embedding_dropout": 0.0}  # transformers' model ignores embd_pdrop


def _glm(hf: Any) -> Fields:
    return {
        "add_attention_output_bias": None
    }  # attention_bias applies to queries, keys and values only


def _gemma(hf: Any) -> Fields:
    # transformers uses hidden_act, and ignores an older hidden_activation.
    return {"embedding_multiplier": hf.hidden_size**0.5}


def _gemma2(hf: Any) -> Fields:
    scale = hf.query_pre_attn_scalar**-0.5
    return {**_gemma(hf), "activation": activation(hf.hidden_activation), "softmax_scale": scale}


def _gemma3(hf: Any) -> Fields:
    local_base, local_scaling = read_rope(hf, hf.rope_parameters["sliding_attention"])
    base, scaling = read_rope(hf, hf.rope_parameters["full_attention"])
    if local_scaling is not None or (scaling is not None and scaling.attention_factor != 1.0):
        kind = "sliding_attention" if local_scaling is not None else "full_attention"
        raise ConfigError(
            f"rope_parameters of {kind}: expected 'default' (or for full_attention 'linear' or another without an "
            f"attention factor), got {hf.rope_parameters[kind]['rope_type']!r}; use one of those"
        )
    rope = {"rotary_base": base, "rope_scaling": scaling, "rotary_base_of_windows": local_base}
    return {**_gemma2(hf), "position_embedding_type": "rope", **rope}


_FULL_QK_NORM = {"qk_layernorm": True, "qk_layernorm_of_all_heads": True}
_GLM = {**LLAMA, "rotary_interleaved": True}
_GLM_NAMES = DecoderNames(
    fc1=("mlp.gate_up_proj",),
    post_attention_norm="post_self_attn_layernorm",
    post_mlp_norm="post_mlp_layernorm",
)
_GEMMA = {**LLAMA, "zero_centered_norms": True}
_GEMMA2_NAMES = DecoderNames(mlp_norm="pre_feedforward_layernorm")
_CAUSAL = {"use_bidirectional_attention": (None, False)}

# ---- mixtures of experts ---------------------------------------------------------------------------------------------


def _experts(hf: Any, ffn_hidden_size: int, **fields: Any) -> Fields:
    experts = Experts(
        num_experts=hf.num_experts,
        topk=hf.num_experts_per_tok,
        ffn_hidden_size=ffn_hidden_size,
        load_balancing_loss_coef=hf.router_aux_loss_coef,
        normalizes_topk=getattr(hf, "norm_topk_prob", True),
        **fields,
    )
    return {"experts": experts}


def _mixtral(hf: Any) -> Fields:
    return _experts(hf, hf.intermediate_size)


def _qwen_moe(hf: Any) -> Fields:
    dense = tuple(
        layer
        for layer in range(hf.num_hidden_layers)
        if layer in hf.mlp_only_layers or (layer + 1) % hf.decoder_sparse_step != 0
    )
    if hf.num_experts == 0 or len(dense) == hf.num_hidden_layers:
        return {}
    shared = getattr(hf, "shared_expert_intermediate_size", 0)
    return _experts(hf, hf.moe_intermediate_size, shared_ffn_hidden_size=shared, dense_layers=dense)


FAMILIES = (
    Family("llama", causal_lm("Llama"), LLAMA, required={"pretraining_tp": (1, None)}),
    Family("mistral", causal_lm("Mistral"), LLAMA),
    Family("qwen2", causal_lm("Qwen2"), {**LLAMA, "add_qkv_bias": True}),
    Family("qwen3", causal_lm("Qwen3"), {**LLAMA, "qk_layernorm": True}),
    Family("granite", causal_lm("Granite"), LLAMA, _granite),
    Family("smollm3", causal_lm("SmolLM3"), LLAMA, _smollm3),
    Family(
        "olmo2",
        causal_lm("Olmo2"),
        {**LLAMA, "pre_norms": False, "post_norms": True, **_FULL_QK_NORM},
    ),
    Family(
        *("phi3", causal_lm("Phi3"), LLAMA, _phi3),
        names=DecoderNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
        partial_rotary=True,
    ),
    Family("glm", causal_lm("Glm"), _GLM, _glm, _GLM_NAMES, partial_rotary=True),
    Family(
        "glm4",
        causal_lm("Glm4"),
        {**_GLM, "post_norms": True},
        _glm,
        _GLM_NAMES,
        partial_rotary=True,
    ),
    Family("gemma", causal_lm("Gemma"), _GEMMA, _gemma, required=_CAUSAL),
    Family(
        "gemma2",
        causal_lm("Gemma2"),
        {**_GEMMA, "post_norms": True},
        _gemma2,
        _GEMMA2_NAMES,
        required=_CAUSAL,
    ),
    Family(
        *(
            "gemma3_text",
            causal_lm("Gemma3"),
            {**_GEMMA, "post_norms": True, "qk_layernorm": True},
            _gemma3,
        ),
        names=_GEMMA2_NAMES,
        # Hugging Face's Gemma 3 ignores attn_logit_softcapping.
        required={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
    ),
    Family(
        *("mixtral", causal_lm("Mixtral"), LLAMA, _mixtral),
        names=DecoderNames(experts="block_sparse_moe", expert=("w1", "w3", "w2")),
        required={"router_jitter_noise": (0.0,)},
    ),
    Family("qwen2_moe", causal_lm("Qwen2Moe"), LLAMA, _qwen_moe),
    Family("qwen3_moe", causal_lm("Qwen3Moe"), {**LLAMA, "qk_layernorm": True}, _qwen_moe),
    Family(
        "olmoe",
        causal_lm("Olmoe"),
        {**LLAMA, **_FULL_QK_NORM},
        _mixtral,
        required={"clip_qkv": (None,)},
    ),
)
