"""Llama and what has its names: RMSNorm, a gated MLP, rotary positions, grouped queries.

Llama (Touvron et al. 2023; Grattafiori et al. 2024). Mistral (Jiang et al. 2023): tokens see the last
``sliding_window`` tokens only. Qwen 2 and 2.5 (Yang et al. 2024): biases on queries, keys and values, and windows in
the later layers. Qwen 3 (Yang et al. 2025): each head's queries and keys are normalized, and heads have any width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import LAYER, Family, Rule, activation, qkv_order
from lightning_megatron.convert.gpt_tables import (
    ATTENTION,
    INPUT_NORM,
    MLP,
    MLP_NORM,
    linear,
    norm,
    output_layer,
    rope_fields,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _described(hf: Any, family: str) -> ModelConfig:
    """A decoder with Llama's config fields, without biases.

    ``pad_token_id`` is not among them: Hugging Face does not train that row of the input embedding, we do where the
    token stands in a sentence. Padding is told by the mask, and where it is, no row gets a gradient.

    Raises:
        ConfigError: If a field cannot be honoured.
    """
    head_width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return ModelConfig(
        family=family,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_width,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        activation=activation(hf.hidden_act),
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=False,
        position_embedding_type="rope",
        **rope_fields(hf),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        attention_dropout=hf.attention_dropout,
        init_method_std=hf.initializer_range,
        scaled_residual_init=False,
    )


def _windows(hf: Any) -> dict[str, Any]:
    """Which layers see how far back, from ``layer_types``; Hugging Face derives them from ``max_window_layers``.

    Raises:
        ConfigError: If a layer is of an unknown type, or has a window of unknown width.
    """
    unknown = sorted(set(hf.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"layer_types has {unknown[0]!r}, which is not supported; use 'full_attention' or 'sliding_attention'"
        )
    windowed = tuple(i for i, kind in enumerate(hf.layer_types) if kind == "sliding_attention")
    if windowed and hf.sliding_window is None:
        raise ConfigError(
            "layer_types has 'sliding_attention', but use_sliding_window is not True and sliding_window is not set; "
            "set both, or use 'full_attention'"
        )
    return {
        "sliding_window": hf.sliding_window if windowed else None,
        "sliding_window_layers": windowed or None,
    }


def _rules(model: ModelConfig) -> list[Rule]:
    """All weights of a decoder with three matrices for queries, keys and values, and a gated MLP."""
    hf = f"model.layers.{LAYER}."
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=("model.embed_tokens.weight",)),
        *norm("decoder.final_layernorm.", "model.norm", model),
        *norm(INPUT_NORM, hf + "input_layernorm", model),
        *linear(
            ATTENTION + "linear_qkv",
            tuple(f"{hf}self_attn.{name}_proj" for name in "qkv"),
            model.add_qkv_bias,
            rows=(queries, keys, keys),
            order=qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels),
        ),
        *linear(ATTENTION + "linear_proj", (hf + "self_attn.o_proj",), model.has_attention_output_bias),
        *norm(MLP_NORM, hf + "post_attention_layernorm", model),
        *linear(
            MLP + "linear_fc1",
            (hf + "mlp.gate_proj", hf + "mlp.up_proj"),
            model.add_bias_linear,
            rows=(model.ffn_hidden_size, model.ffn_hidden_size),
        ),
        *linear(MLP + "linear_fc2", (hf + "mlp.down_proj",), model.add_bias_linear),
        *output_layer(model),
    ]
    if model.qk_layernorm:
        rules += norm(ATTENTION + "q_layernorm.", hf + "self_attn.q_norm", model)
        rules += norm(ATTENTION + "k_layernorm.", hf + "self_attn.k_norm", model)
    return rules


def _llama(hf: Any) -> ModelConfig:
    return replace(
        _described(hf, "llama"),
        add_bias_linear=hf.mlp_bias,
        add_qkv_bias=hf.attention_bias,
        add_attention_output_bias=hf.attention_bias,
    )


def _mistral(hf: Any) -> ModelConfig:
    return replace(_described(hf, "mistral"), sliding_window=hf.sliding_window)


def _qwen2(hf: Any) -> ModelConfig:
    return replace(_described(hf, "qwen2"), add_qkv_bias=True, **_windows(hf))


def _qwen3(hf: Any) -> ModelConfig:
    return replace(
        _described(hf, "qwen3"),
        add_qkv_bias=hf.attention_bias,
        add_attention_output_bias=hf.attention_bias,
        qk_layernorm=True,
        **_windows(hf),
    )


def _family(
    model_type: str,
    architecture: str,
    describe: Callable[[Any], ModelConfig],
    required: Mapping[str, tuple[Any, ...]] | None = None,
) -> Family:
    """A family with Llama's names; the arguments are those of ``Family``, and the class with the head."""
    return Family(
        model_type=model_type,
        describe=describe,
        required=required or {},
        rules=_rules,
        architectures={"causal_lm": architecture},
        base_prefix="model.",
        buffers=("*.rotary_emb.inv_freq",),
    )


FAMILIES = (
    _family("llama", "LlamaForCausalLM", _llama, {"pretraining_tp": (1, None)}),
    _family("mistral", "MistralForCausalLM", _mistral),
    _family("qwen2", "Qwen2ForCausalLM", _qwen2),
    _family("qwen3", "Qwen3ForCausalLM", _qwen3),
)
