"""Fields of a ``ModelConfig`` from those of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import Activation

Fields: TypeAlias = Mapping[str, Any]
"""Some fields of a ``ModelConfig``."""
LLAMA: Fields = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
"""Fields in which Llama differs from GPT-2, besides rotary embeddings."""

_FIELD_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size ffn_hidden_size ffn_dim d_ff",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads num_attention_heads",
    "vocab_size": "vocab_size",
    "num_tokentypes": "type_vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps",
    "activation": "hidden_act activation_function activation",
    "add_qkv_bias": "attention_bias use_qkv_bias qkv_bias use_bias enable_bias bias",
    "add_attention_output_bias": "attention_bias",
    "add_bias_linear": "mlp_bias use_bias enable_bias bias",
    "parallel_attention": "use_parallel_residual parallel_attn",
    "sliding_window": "sliding_window",
    "softmax_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_multiplier": "logit_scale",
    "attention_softcap": "attn_logit_softcapping",
    "logits_softcap": "final_logit_softcapping",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    "embedding_dropout": "embd_pdrop embedding_dropout",
    "hidden_dropout": "hidden_dropout hidden_dropout_prob resid_pdrop residual_dropout dropout",
    "attention_dropout": "attention_dropout attn_pdrop attention_probs_dropout_prob",
    "init_method_std": "initializer_range init_std initializer_factor",
}
"""Fields of a ``ModelConfig``, and their common names in Hugging Face configs; the first that a config has is used."""


def has_field(hf: Any, name: str) -> bool:
    """Whether the class of a Hugging Face config object has a field; its models read no other keys of a file."""
    return name in hf.__dataclass_fields__ or name in hf.attribute_map


def config_field_names(hf: Any) -> dict[str, str]:
    """Fields of a ``ModelConfig`` that a Hugging Face config object has under a common name, and that name."""
    found: dict[str, str] = {}
    for ours, names in _FIELD_NAMES.items():
        for name in names.split():
            if has_field(hf, name):
                found[ours] = name
                break
    return found


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


def activation(name: str) -> Activation:
    """Megatron's name of a Hugging Face activation function.

    Raises:
        ConfigError: If it is not supported.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


_MAX_HEAD_DIM = 1 << 16


def head_dim(hf: Any) -> int:
    """Size of an attention head: the config's ``head_dim``, else hidden_size / num_attention_heads.

    Raises:
        ConfigError: If num_attention_heads does not divide hidden_size, or heads are too large.
    """
    width = getattr(hf, "head_dim", None)
    if width:
        if width > _MAX_HEAD_DIM:  # rotary frequencies are computed for every pair of dimensions
            raise ConfigError(
                f"head_dim={width}: expected at most {_MAX_HEAD_DIM}; correct the model's config"
            )
        return int(width)
    require_divides("num_attention_heads", hf.num_attention_heads, "hidden_size", hf.hidden_size)
    return int(hf.hidden_size // hf.num_attention_heads)


def layers_of_kind(hf: Any, kind: str, others: tuple[str, ...]) -> tuple[int, ...]:
    """Layers (from 0) whose entry of ``layer_types`` is ``kind``.

    Args:
        hf: A Hugging Face config object.
        kind: A type of layers.
        others: Types of the other layers.

    Raises:
        ConfigError: If a layer type is unknown, or there is not one for each layer.
    """
    kinds = (*others, kind)
    unknown = sorted(set(hf.layer_types) - set(kinds))
    if unknown:
        raise ConfigError(
            f"layer_types has {unknown[0]!r}, which is not supported; use {' or '.join(map(repr, kinds))}"
        )
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ConfigError(
            f"layer_types: expected a type for each of {hf.num_hidden_layers} layers, got {len(hf.layer_types)}; "
            "correct the model's config"
        )
    return tuple(layer for layer, of_layer in enumerate(hf.layer_types) if of_layer == kind)


def window_fields(hf: Any) -> dict[str, Any]:
    """Sliding window and its layers from ``layer_types``, as fields of a ``ModelConfig``.

    Raises:
        ConfigError: If a layer type is unknown, or the size of the window is not set.
    """
    windowed = layers_of_kind(hf, "sliding_attention", ("full_attention",))
    if windowed and not hf.sliding_window:  # Qwen 2 MoE sets 0 if it is not used
        raise ConfigError(
            "layer_types has 'sliding_attention', but use_sliding_window is not True and sliding_window is not set; "
            "set both, or use 'full_attention'"
        )
    return {
        "sliding_window": hf.sliding_window if windowed else None,
        "sliding_window_layers": windowed or None,
    }
