"""Mixtures of experts with Llama's names: Mixtral, Qwen 2 and 3 MoE, OLMoE.

Mixtral (Jiang et al. 2024, arXiv 2401.04088): each MLP is eight, of which a token goes through two. Qwen 2 MoE (Yang et
al. 2024): many narrow experts, whose probabilities are not normalized, and one for all tokens. Qwen 3 MoE (Yang et al.
2025): 128 experts, none for all. In both some layers may have an ordinary MLP. OLMoE (Muennighoff et al. 2024, arXiv
2409.02060): 64 experts, and queries and keys are normalized over all heads.

``output_router_logits``, with which transformers adds the auxiliary loss, is not looked at: training here balances the
experts wherever ``router_aux_loss_coef`` is not 0.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from lightning_megatron.convert.family import (
    EXPERT,
    LAYER,
    LLAMA_NAMES,
    Rule,
    attention_biases,
    decoder,
    decoder_rules,
    linear,
    llama_like,
    norm,
    windows,
)
from lightning_megatron.models.config import Experts, ModelConfig

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


def _described(hf: Any, experts: Experts | None, **own: Any) -> ModelConfig:
    return llama_like(hf, {"experts": experts, **own})


def _mixtral(hf: Any) -> ModelConfig:
    return _described(hf, _experts(hf, hf.intermediate_size), sliding_window=hf.sliding_window)


def _qwen2_moe(hf: Any) -> ModelConfig:
    experts = _qwen_experts(hf, hf.shared_expert_intermediate_size)
    return _described(hf, experts, add_qkv_bias=hf.qkv_bias, **windows(hf))


def _qwen3_moe(hf: Any) -> ModelConfig:
    return _described(
        hf, _qwen_experts(hf), qk_layernorm=True, sliding_window=hf.sliding_window, **attention_biases(hf)
    )


def _olmoe(hf: Any) -> ModelConfig:
    experts = _experts(hf, hf.intermediate_size, normalizes_topk=hf.norm_topk_prob)
    return _described(hf, experts, qk_layernorm=True, qk_layernorm_of_all_heads=True, **attention_biases(hf))


_of_qwen = partial(_mixture, "mlp", ("gate_proj", "up_proj", "down_proj"))
_of_mixtral = partial(_mixture, "block_sparse_moe", ("w1", "w3", "w2"))

FAMILIES = tuple(
    replace(decoder(model_type, architecture, describe, required=required), rules=rules)
    for model_type, architecture, describe, rules, required in (
        ("mixtral", "MixtralForCausalLM", _mixtral, _of_mixtral, {"router_jitter_noise": (0.0,)}),
        ("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2_moe, _of_qwen, {}),
        ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _of_qwen, {}),
        ("olmoe", "OlmoeForCausalLM", _olmoe, _of_qwen, {"clip_qkv": (None,)}),
    )
)
