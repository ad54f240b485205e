"""What do the Hugging Face configs of several GPT families have in common? Descriptions that a family completes."""

from __future__ import annotations

from typing import Any, TypedDict

from lightning_megatron.convert.family import activation
from lightning_megatron.convert.rope import read_rope
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling


class RopeFields(TypedDict):
    """Fields of a ``ModelConfig``."""

    rotary_base: float
    rope_scaling: RopeScaling | None


class WindowFields(TypedDict):
    """Fields of a ``ModelConfig``."""

    sliding_window: int | None
    sliding_window_layers: tuple[int, ...] | None


def gpt2_config(hf: Any, family: str) -> ModelConfig:
    """A decoder with GPT-2's config fields, and as many key/value heads as query heads.

    Raises:
        ConfigError: If a field cannot be honoured.
    """
    return ModelConfig(
        family=family,
        num_layers=hf.n_layer,
        hidden_size=hf.n_embd,
        ffn_hidden_size=4 * hf.n_embd if hf.n_inner is None else hf.n_inner,
        num_attention_heads=hf.n_head,
        num_query_groups=hf.n_head,
        kv_channels=hf.n_embd // hf.n_head,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.n_positions,
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation=activation(hf.activation_function),
        softmax_scale=None if hf.scale_attn_weights else 1.0,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        embedding_dropout=hf.embd_pdrop,
        hidden_dropout=hf.resid_pdrop,
        attention_dropout=hf.attn_pdrop,
        init_method_std=hf.initializer_range,
    )


def llama_config(hf: Any, family: str) -> ModelConfig:
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


def rope_fields(hf: Any) -> RopeFields:
    """Theta and the scaling of rotary positions.

    Raises:
        ConfigError: If ``rope_parameters`` cannot be honoured.
    """
    base, scaling = read_rope(hf.rope_parameters, hf.max_position_embeddings)
    return {"rotary_base": base, "rope_scaling": scaling}


def window_fields(hf: Any) -> WindowFields:
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
