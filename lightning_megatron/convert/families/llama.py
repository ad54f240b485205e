"""Llama and decoders with its weight names: RMSNorm, gated MLP, rotary embeddings, grouped-query attention.

Llama (Touvron et al. 2023; Grattafiori et al. 2024). Mistral (Jiang et al. 2023): sliding window attention. Qwen 2 and
2.5 (Yang et al. 2024): biases on queries, keys and values, and sliding windows in the later layers. Qwen 3 (Yang et al.
2025): QK norm per head, and any head_dim. Granite 3 (IBM 2024): multipliers of embeddings, scores, residuals and
logits. SmolLM 3 (Bakouch et al. 2025): no rotary embeddings in every fourth layer. OLMo 2 (Walsh et al. 2024): norms
after blocks instead of before, and QK norm over all heads. EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): the same
norms, QK norm per head, and sliding windows in three of four layers, which alone have rotary embeddings. Seed-OSS
(ByteDance 2025): biases on queries, keys and values. Ministral (Mistral AI 2024): windows by ``layer_types``. Ministral
3 (Mistral AI 2025): queries multiplied by a number that grows with the position. Apertus (Swiss AI Initiative 2025,
arXiv 2509.14233): QK norm per head, and an MLP without gate whose activation has parameters. Hunyuan (Tencent 2025): QK
norm after the rotary embedding, whose base is stretched once. ERNIE 4.5 (Baidu 2025): interleaved rotary embeddings.
Phi-3 and Phi-4 (Abdin et al. 2024): fused QKV and gate-up matrices. GLM-4 (GLM Team 2024): interleaved rotary
embeddings on half of each head; the version of 2025 also has norms after blocks.

Gemma (Gemma Team 2024, arXiv 2403.08295): norms multiply by 1 + weight, embeddings are multiplied by
sqrt(hidden_size), head_dim is large. Gemma 2 (arXiv 2408.00118): norms also after blocks, soft caps on scores and
logits, sliding windows in every other layer. Gemma 3 (arXiv 2503.19786), its language model: QK norm instead of the
cap on scores, sliding windows in five of six layers, which have a rotary base of their own.

Mixtures of experts: Mixtral (Jiang et al. 2024, arXiv 2401.04088): eight experts, top-2. Qwen 2 MoE (Yang et al. 2024):
many small experts, whose top-k probabilities are not normalized, and a shared expert. Qwen 3 MoE (Yang et al. 2025):
128 experts, no shared one. In both some layers may have a dense MLP. Qwen3-Next (Qwen Team 2025): gated delta nets in
three of four layers, gates of attention, a quarter of each head rotated, norms of 1 + weight, 512 experts and a shared
one. Qwen 3.5 (Qwen Team 2026), its language models, dense and with experts: the same with projections that are not
grouped by head. OLMoE (Muennighoff et al. 2024, arXiv
2409.02060): 64 experts, and QK norm over all heads. dots.llm1 (rednote 2025, arXiv 2506.05767) and GLM-4.5 (GLM Team
2025, arXiv 2508.06471): the router of DeepSeek-V3 (arXiv 2412.19437), sigmoids with a bias and groups, leading dense
layers, and shared experts without a gate. DeepSeek-V3 itself, Moonlight and Kimi K2 (Moonshot AI 2025, arXiv
2507.20534) also have its latent attention. Layers of multi-token prediction are left out, as in transformers.
ERNIE 4.5 (Baidu 2025): a softmax router with a selection bias, shared experts without a gate, dense layers.
gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks in attention, windows in every other layer, biases everywhere, a softmax
over the chosen logits of the router, and clamped SwiGLU. ``output_router_logits``, with which transformers adds the
auxiliary loss, is ignored: training here adds the load balancing loss whenever ``router_aux_loss_coef`` is not 0.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.decoder_rules import DecoderNames, StackedExperts
from lightning_megatron.convert.family import Family, causal_lm, classifiers
from lightning_megatron.convert.model_fields import (
    LLAMA,
    Fields,
    activation,
    has_field,
    head_dim,
    layers_of_kind,
)
from lightning_megatron.convert.rope import latent_softmax_scale, read_rope, rotated_part
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Experts, LatentAttention, LinearAttention


def _granite(hf: Any) -> Fields:
    return {"logits_multiplier": 1.0 / hf.logits_scaling}


def _smollm3(hf: Any) -> Fields:
    # transformers' masks use the windows of layer_types and ignore use_sliding_window.
    layers = range(hf.num_hidden_layers)
    return {"no_rope_layers": tuple(layer for layer in layers if not hf.no_rope_layers[layer])}


def _exaone4(hf: Any) -> Fields:
    if hf.sliding_window is None:
        return {}
    kinds = enumerate(hf.layer_types)
    return {"no_rope_layers": tuple(layer for layer, kind in kinds if kind == "full_attention")}


def _seed_oss(hf: Any) -> Fields:
    return {"add_attention_output_bias": hf.attention_out_bias}


def _hunyuan(hf: Any) -> Fields:
    rope = dict(hf.rope_parameters or {})
    kind = rope.get("rope_type", rope.get("type"))
    alpha = rope.get("alpha")
    if kind != "dynamic" or not alpha:
        return {}
    # With alpha the published files say "dynamic", but mean a fixed base, which the length does not change.
    width = head_dim(hf)
    base = float(rope.get("rope_theta", 10000.0)) * float(alpha) ** (width / (width - 2))
    return {"position_embedding_type": "rope", "rotary_base": base, "rope_scaling": None}


def _ministral3(hf: Any) -> Fields:
    rope = hf.rope_parameters
    base, scaling = read_rope(hf, rope, others=("llama_4_scaling_beta", "max_position_embeddings"))
    scaled: dict[str, Any] = {}
    for ours, name in (
        ("query_scaling_beta", "llama_4_scaling_beta"),
        ("query_scaling_length", "original_max_position_embeddings"),
    ):
        if rope.get(name) is None:
            raise ConfigError(
                f"{name} of rope_parameters: expected a number, by which transformers scales the queries of a "
                "ministral3 model, got none; set it (with a beta of 0 they are not scaled)"
            )
        scaled[ours] = rope[name]
    return {
        **scaled,
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rope_scaling": scaling,
    }


def _apertus(hf: Any) -> Fields:
    # The function is named for this family alone: in others transformers would keep its parameters in bf16.
    if hf.hidden_act == "xielu":
        return {"activation": "xielu"}
    return {}


def _phi3(hf: Any) -> Fields:
    return {"embedding_dropout": 0.0}  # transformers' model ignores embd_pdrop


def _glm(hf: Any) -> Fields:
    # attention_bias applies to queries, keys and values only.
    return {"add_attention_output_bias": None}


def _gemma(hf: Any) -> Fields:
    # transformers uses hidden_act, and ignores an older hidden_activation.
    return {"embedding_multiplier": hf.hidden_size**0.5}


def _gemma2(hf: Any) -> Fields:
    return {
        **_gemma(hf),
        "activation": activation(hf.hidden_activation),
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
    }


def _gemma3(hf: Any) -> Fields:
    local_base, local_scaling = read_rope(hf, hf.rope_parameters["sliding_attention"])
    base, scaling = read_rope(hf, hf.rope_parameters["full_attention"])
    unsupported = None
    if local_scaling is not None:
        unsupported = "sliding_attention"
    elif scaling is not None and scaling.attention_factor != 1.0:
        unsupported = "full_attention"
    if unsupported is not None:
        raise ConfigError(
            f"rope_parameters of {unsupported}: expected 'default' (or for full_attention 'linear' or another without "
            f"an attention factor), got {hf.rope_parameters[unsupported]['rope_type']!r}; use one of those"
        )
    return {
        **_gemma2(hf),
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rope_scaling": scaling,
        "rotary_base_of_windows": local_base,
    }


def _linear_attention(hf: Any) -> Fields:
    """Layers with a gated delta net, and softmax attention with gates in the others, as in Qwen3-Next."""
    layers = layers_of_kind(hf, "linear_attention", ("full_attention",))
    linear = LinearAttention(
        layers=layers,
        num_key_heads=hf.linear_num_key_heads,
        num_value_heads=hf.linear_num_value_heads,
        key_head_dim=hf.linear_key_head_dim,
        value_head_dim=hf.linear_value_head_dim,
        conv_kernel_dim=hf.linear_conv_kernel_dim,
    )
    return {"linear_attention": linear if layers else None, "sliding_window": None}


def _qwen3_next(hf: Any) -> Fields:
    return {**_linear_attention(hf), **_qwen_moe(hf)}


def _qwen3_5(hf: Any) -> Fields:
    rope = hf.rope_parameters or {}
    # Of images; the three positions of a token of text are the same.
    base, scaling = read_rope(
        hf,
        rope,
        partial_rotary=True,
        others=("mrope_interleaved", "mrope_section"),
    )
    return {
        **_linear_attention(hf),
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rope_scaling": scaling,
        "rotary_percent": rotated_part(rope),
    }


def _qwen3_5_moe(hf: Any) -> Fields:
    experts = _experts(
        hf,
        hf.moe_intermediate_size,
        shared_ffn_hidden_size=hf.shared_expert_intermediate_size,
    )
    # No layer has an MLP without experts.
    return {**_qwen3_5(hf), **experts, "ffn_hidden_size": hf.moe_intermediate_size}


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
        normalizes_topk=hf.norm_topk_prob if has_field(hf, "norm_topk_prob") else True,
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
    return _experts(
        hf,
        hf.moe_intermediate_size,
        shared_ffn_hidden_size=getattr(hf, "shared_expert_intermediate_size", 0),
        dense_layers=dense,
    )


def _deepseek_experts(hf: Any) -> Fields:
    """Fields of the mixture of DeepSeek-V3, which others took over."""
    dense = tuple(range(min(hf.first_k_dense_replace, hf.num_hidden_layers)))
    if len(dense) == hf.num_hidden_layers:
        return {}
    experts = Experts(
        num_experts=hf.n_routed_experts,
        topk=hf.num_experts_per_tok,
        ffn_hidden_size=hf.moe_intermediate_size,
        shared_ffn_hidden_size=hf.moe_intermediate_size * hf.n_shared_experts,
        has_shared_gate=False,
        score_function="sigmoid",
        has_selection_bias=True,
        num_groups=hf.n_group,
        topk_groups=hf.topk_group,
        normalizes_topk=hf.norm_topk_prob,
        scaling_factor=hf.routed_scaling_factor,
        dense_layers=dense,
    )
    return {"experts": experts}


def _deepseek_v3(hf: Any) -> Fields:
    latent = LatentAttention(
        kv_lora_rank=hf.kv_lora_rank,
        q_lora_rank=hf.q_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        add_bias=hf.attention_bias,
    )
    width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    return {
        **_deepseek_experts(hf),
        "latent_attention": latent,
        "kv_channels": width,
        "rotary_interleaved": hf.rope_interleave,
        "softmax_scale": latent_softmax_scale(hf.rope_parameters, width),
        # attention_bias applies to latents and the output alone.
        "add_qkv_bias": False,
    }


def _glm4_moe(hf: Any) -> Fields:
    return {
        **_deepseek_experts(hf),
        "qk_layernorm": hf.use_qk_norm,
        # attention_bias applies to queries, keys and values only.
        "add_attention_output_bias": False,
    }


def _ernie_moe(hf: Any) -> Fields:
    first = hf.moe_layer_start_index
    last = hf.moe_layer_end_index
    dense = tuple(
        layer
        for layer in range(hf.num_hidden_layers)
        if (layer + 1) % hf.moe_layer_interval != 0 or not first <= layer <= last
    )
    if len(dense) == hf.num_hidden_layers:
        return {}
    return _experts(
        hf,
        hf.moe_intermediate_size,
        shared_ffn_hidden_size=hf.moe_intermediate_size * hf.moe_num_shared_experts,
        has_shared_gate=False,
        has_selection_bias=True,
        min_topk_sum=hf.moe_norm_min,
        dense_layers=dense,
    )


_GPT_OSS_SWIGLU_LIMIT = 7.0
_GPT_OSS_SWIGLU_ALPHA = 1.702
"""Constants of transformers' gpt-oss until its config got fields of them (5.17 has none, 5.24 has them)."""


def _gpt_oss(hf: Any) -> Fields:
    experts = Experts(
        # Not num_experts, which transformers 5.5 does not know for gpt-oss.
        num_experts=hf.num_local_experts,
        topk=hf.num_experts_per_tok,
        ffn_hidden_size=hf.intermediate_size,
        load_balancing_loss_coef=hf.router_aux_loss_coef,
        add_bias=True,
        swiglu_limit=getattr(hf, "swiglu_limit", _GPT_OSS_SWIGLU_LIMIT),
        swiglu_alpha=getattr(hf, "swiglu_alpha", _GPT_OSS_SWIGLU_ALPHA),
    )
    # transformers' model ignores hidden_act: its experts have their own activation.
    return {"experts": experts, "activation": "silu"}


_ERNIE_NAMES = DecoderNames(
    selection_bias="moe_statics.e_score_correction_bias",
    selection_bias_axes=2,
    shared_expert="shared_experts",
    renamed={"mlp.gate.moe_statics": "mlp.moe_statics"},
)
_DEEPSEEK_NAMES = DecoderNames(shared_expert="shared_experts")
_GPT_OSS_NAMES = DecoderNames(
    router="router",
    stacked_experts=StackedExperts(is_transposed=True, is_interleaved=True),
)
_QWEN3_NEXT = {
    **LLAMA,
    "zero_centered_norms": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
_QWEN3_5_NAMES = DecoderNames(nested_base="model.language_model.")
_SILU = {"hidden_act": ("silu", "swish")}
"""The convolution of linear attention has the activation of MLPs."""
_QWEN3_5_REQUIRED: dict[str, tuple[Any, ...]] = {
    **_SILU,
    # In published files, and not read by transformers.
    "attn_output_gate": (True,),
}


FAMILIES = (
    Family(
        name="llama",
        architectures=causal_lm("Llama"),
        heads=classifiers("Llama"),
        defaults=LLAMA,
        required={"pretraining_tp": (1, None)},
    ),
    Family(
        name="mistral",
        architectures=causal_lm("Mistral"),
        heads=classifiers("Mistral"),
        defaults=LLAMA,
    ),
    Family(
        name="qwen2",
        architectures=causal_lm("Qwen2"),
        heads=classifiers("Qwen2"),
        defaults={**LLAMA, "add_qkv_bias": True},
    ),
    Family(
        name="qwen3",
        architectures=causal_lm("Qwen3"),
        heads=classifiers("Qwen3"),
        defaults={**LLAMA, "qk_layernorm": True},
    ),
    Family(
        name="granite",
        architectures=causal_lm("Granite"),
        defaults=LLAMA,
        custom_fields=_granite,
    ),
    Family(
        name="smollm3",
        architectures=causal_lm("SmolLM3"),
        heads=classifiers("SmolLM3"),
        defaults=LLAMA,
        custom_fields=_smollm3,
    ),
    Family(
        name="olmo2",
        architectures=causal_lm("Olmo2"),
        heads=classifiers("Olmo2", has_tokens=False),
        defaults={**LLAMA, **_FULL_QK_NORM, "pre_norms": False, "post_norms": True},
    ),
    Family(
        name="exaone4",
        architectures=causal_lm("Exaone4"),
        heads=classifiers("Exaone4"),
        defaults={**LLAMA, "qk_layernorm": True, "pre_norms": False, "post_norms": True},
        custom_fields=_exaone4,
    ),
    Family(
        name="seed_oss",
        architectures=causal_lm("SeedOss"),
        heads=classifiers("SeedOss"),
        defaults=LLAMA,
        custom_fields=_seed_oss,
    ),
    Family(
        name="ministral",
        architectures=causal_lm("Ministral"),
        heads=classifiers("Ministral"),
        defaults=LLAMA,
    ),
    Family(
        name="ministral3",
        architectures=causal_lm("Ministral3"),
        heads=classifiers("Ministral3"),
        defaults=LLAMA,
        custom_fields=_ministral3,
    ),
    Family(
        name="apertus",
        architectures=causal_lm("Apertus"),
        heads=classifiers("Apertus", has_sequences=False),
        defaults={**LLAMA, "qk_layernorm": True, "gated_linear_unit": False},
        custom_fields=_apertus,
        names=DecoderNames(
            input_norm="attention_layernorm",
            mlp_norm="feedforward_layernorm",
            fc1=("mlp.up_proj",),
        ),
    ),
    Family(
        name="hunyuan_v1_dense",
        architectures=causal_lm("HunYuanDenseV1"),
        heads=classifiers("HunYuanDenseV1", has_tokens=False),
        defaults={**LLAMA, "qk_layernorm": True, "qk_layernorm_after_rotary": True},
        custom_fields=_hunyuan,
        names=DecoderNames(
            q_norm="self_attn.query_layernorm",
            k_norm="self_attn.key_layernorm",
        ),
    ),
    Family(
        name="ernie4_5",
        architectures=causal_lm("Ernie4_5"),
        defaults={**LLAMA, "rotary_interleaved": True},
    ),
    Family(
        name="phi3",
        architectures=causal_lm("Phi3"),
        heads=classifiers("Phi3"),
        defaults=LLAMA,
        custom_fields=_phi3,
        names=DecoderNames(qkv=("self_attn.qkv_proj",), fc1=("mlp.gate_up_proj",)),
        partial_rotary=True,
    ),
    Family(
        name="glm",
        architectures=causal_lm("Glm"),
        heads=classifiers("Glm"),
        defaults=_GLM,
        custom_fields=_glm,
        names=_GLM_NAMES,
        partial_rotary=True,
    ),
    Family(
        name="glm4",
        architectures=causal_lm("Glm4"),
        heads=classifiers("Glm4"),
        defaults={**_GLM, "post_norms": True},
        custom_fields=_glm,
        names=_GLM_NAMES,
        partial_rotary=True,
    ),
    Family(
        name="gemma",
        architectures=causal_lm("Gemma"),
        heads=classifiers("Gemma"),
        defaults=_GEMMA,
        custom_fields=_gemma,
        required=_CAUSAL,
    ),
    Family(
        name="gemma2",
        architectures=causal_lm("Gemma2"),
        heads=classifiers("Gemma2"),
        defaults={**_GEMMA, "post_norms": True},
        custom_fields=_gemma2,
        names=_GEMMA2_NAMES,
        required=_CAUSAL,
    ),
    Family(
        name="gemma3_text",
        architectures=causal_lm("Gemma3"),
        heads=classifiers("Gemma3Text", has_tokens=False),
        defaults={**_GEMMA, "post_norms": True, "qk_layernorm": True},
        custom_fields=_gemma3,
        names=_GEMMA2_NAMES,
        required={
            "use_bidirectional_attention": (False, None),
            # Hugging Face's Gemma 3 ignores it.
            "attn_logit_softcapping": (None,),
        },
    ),
    Family(
        name="mixtral",
        architectures=causal_lm("Mixtral"),
        heads=classifiers("Mixtral"),
        defaults=LLAMA,
        custom_fields=_mixtral,
        names=DecoderNames(
            experts="block_sparse_moe",
            expert=("w1", "w3", "w2"),
            renamed={"mlp.gate": "block_sparse_moe.gate"},
        ),
        required={"router_jitter_noise": (0.0,)},
    ),
    Family(
        name="qwen2_moe",
        architectures=causal_lm("Qwen2Moe"),
        heads=classifiers("Qwen2Moe"),
        defaults=LLAMA,
        custom_fields=_qwen_moe,
    ),
    Family(
        name="qwen3_moe",
        architectures=causal_lm("Qwen3Moe"),
        heads=classifiers("Qwen3Moe"),
        defaults={**LLAMA, "qk_layernorm": True},
        custom_fields=_qwen_moe,
    ),
    Family(
        name="qwen3_next",
        architectures=causal_lm("Qwen3Next"),
        heads=classifiers("Qwen3Next"),
        defaults=_QWEN3_NEXT,
        custom_fields=_qwen3_next,
        names=DecoderNames(in_proj=("in_proj_qkvz", "in_proj_ba")),
        required=_SILU,
        partial_rotary=True,
    ),
    Family(
        name="qwen3_5_text",
        architectures=causal_lm("Qwen3_5"),
        heads=classifiers("Qwen3_5Text", has_tokens=False),
        defaults=_QWEN3_NEXT,
        custom_fields=_qwen3_5,
        names=_QWEN3_5_NAMES,
        required=_QWEN3_5_REQUIRED,
        partial_rotary=True,
    ),
    Family(
        name="qwen3_5_moe_text",
        architectures=causal_lm("Qwen3_5Moe"),
        defaults=_QWEN3_NEXT,
        custom_fields=_qwen3_5_moe,
        names=_QWEN3_5_NAMES,
        required=_QWEN3_5_REQUIRED,
        partial_rotary=True,
    ),
    Family(
        name="dots1",
        architectures=causal_lm("Dots1"),
        defaults={**LLAMA, "qk_layernorm": True},
        custom_fields=_deepseek_experts,
        names=_DEEPSEEK_NAMES,
    ),
    Family(
        name="deepseek_v3",
        aliases=("kimi_k2",),
        architectures=causal_lm("DeepseekV3"),
        heads=classifiers("DeepseekV3"),
        defaults=LLAMA,
        custom_fields=_deepseek_v3,
        names=_DEEPSEEK_NAMES,
        required={
            "pretraining_tp": (1, None),
            # Read by the code that is published with the weights, and not by transformers.
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
        quantizations=("fp8",),
    ),
    Family(
        name="glm4_moe",
        architectures=causal_lm("Glm4Moe"),
        defaults=LLAMA,
        custom_fields=_glm4_moe,
        names=_DEEPSEEK_NAMES,
        partial_rotary=True,
    ),
    Family(
        name="ernie4_5_moe",
        architectures=causal_lm("Ernie4_5_Moe"),
        defaults={**LLAMA, "rotary_interleaved": True},
        custom_fields=_ernie_moe,
        names=_ERNIE_NAMES,
        # It adds a bias to the output layer, too.
        required={"use_bias": (False, None)},
    ),
    Family(
        name="gpt_oss",
        architectures=causal_lm("GptOss"),
        heads=classifiers("GptOss"),
        defaults={**LLAMA, "attention_sinks": True},
        custom_fields=_gpt_oss,
        names=_GPT_OSS_NAMES,
        quantizations=("mxfp4",),
    ),
    Family(
        name="olmoe",
        architectures=causal_lm("Olmoe"),
        defaults={**LLAMA, **_FULL_QK_NORM},
        custom_fields=_mixtral,
        required={"clip_qkv": (None,)},
    ),
)
