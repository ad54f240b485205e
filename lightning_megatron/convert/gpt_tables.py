"""Pieces shared by the tables of several GPT families: descriptions from config fields, and rules of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.convert.rope import read_rope
from lightning_megatron.convert.rules import LAYER, POSITIONS, Rule, qkv_order
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling

_LAYERS = "decoder.layers."
_ATTENTION, _MLP = _LAYERS + "self_attention.", _LAYERS + "mlp."
_INPUT_NORM, _MLP_NORM = _ATTENTION + "linear_qkv.layer_norm_", _MLP + "linear_fc1.layer_norm_"


# ---- descriptions ---------------------------------------------------------------------------------------------------


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


# ---- rules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FusedNames:
    """Hugging Face's names in a decoder that keeps queries, keys and values in one matrix, without ``.weight``."""

    embedding: str = "transformer.word_embeddings"
    final_norm: str = "transformer.ln_f"
    layer: str = f"transformer.h.{LAYER}."
    """What the following names begin with."""
    input_norm: str = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    """None if the MLP shares the attention's norm."""
    qkv: str = "self_attention.query_key_value"
    proj: str = "self_attention.dense"
    fc1: str = "mlp.dense_h_to_4h"
    fc2: str = "mlp.dense_4h_to_h"


GPT2_NAMES = FusedNames(
    embedding="transformer.wte",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    proj="attn.c_proj",
    fc1="mlp.c_fc",
    fc2="mlp.c_proj",
)


def fused_rules(
    names: FusedNames, model: ModelConfig, order: torch.Tensor | None = None, *, transposed: bool = False
) -> list[Rule]:
    """All weights of a decoder with one matrix for queries, keys and values.

    Args:
        names: The family's.
        model: The description.
        order: Of the rows of the matrix for queries, keys and values; None if it is Megatron's.
        transposed: Whether the layers' matrices are kept transposed.
    """
    hf = names.layer
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=(names.embedding + ".weight",)),
        *norm("decoder.final_layernorm.", names.final_norm, model),
        *norm(_INPUT_NORM, hf + names.input_norm, model),
        *linear(_ATTENTION + "linear_qkv", (hf + names.qkv,), model.add_qkv_bias, order=order, transposed=transposed),
        *linear(_ATTENTION + "linear_proj", (hf + names.proj,), model.has_attention_output_bias, transposed=transposed),
        *linear(_MLP + "linear_fc1", (hf + names.fc1,), model.add_bias_linear, transposed=transposed),
        *linear(_MLP + "linear_fc2", (hf + names.fc2,), model.add_bias_linear, transposed=transposed),
        *_head(model),
    ]
    if names.mlp_norm is not None:
        rules += norm(_MLP_NORM, hf + names.mlp_norm, model)
    return rules


def llama_rules(model: ModelConfig) -> list[Rule]:
    """All weights of a decoder with three matrices for queries, keys and values, and a gated MLP."""
    hf = f"model.layers.{LAYER}."
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=("model.embed_tokens.weight",)),
        *norm("decoder.final_layernorm.", "model.norm", model),
        *norm(_INPUT_NORM, hf + "input_layernorm", model),
        *linear(
            _ATTENTION + "linear_qkv",
            tuple(f"{hf}self_attn.{name}_proj" for name in "qkv"),
            model.add_qkv_bias,
            rows=(queries, keys, keys),
            order=qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels),
        ),
        *linear(_ATTENTION + "linear_proj", (hf + "self_attn.o_proj",), model.has_attention_output_bias),
        *norm(_MLP_NORM, hf + "post_attention_layernorm", model),
        *linear(
            _MLP + "linear_fc1",
            (hf + "mlp.gate_proj", hf + "mlp.up_proj"),
            model.add_bias_linear,
            rows=(model.ffn_hidden_size, model.ffn_hidden_size),
        ),
        *linear(_MLP + "linear_fc2", (hf + "mlp.down_proj",), model.add_bias_linear),
        *_head(model),
    ]
    if model.qk_layernorm:
        rules += norm(_ATTENTION + "q_layernorm.", hf + "self_attn.q_norm", model)
        rules += norm(_ATTENTION + "k_layernorm.", hf + "self_attn.k_norm", model)
    return rules


def linear(
    megatron: str,
    hugging_face: tuple[str, ...],
    has_bias: bool,
    *,
    rows: tuple[int, ...] = (),
    order: torch.Tensor | None = None,
    transposed: bool = False,
) -> list[Rule]:
    """A matrix and, if it has one, its bias; the arguments are those of ``Rule``, names without ``.weight``."""
    weights, biases = (tuple(f"{name}.{kind}" for name in hugging_face) for kind in ("weight", "bias"))
    rules = [Rule(megatron=megatron + ".weight", hugging_face=weights, rows=rows, order=order, transposed=transposed)]
    if has_bias:
        rules.append(Rule(megatron=megatron + ".bias", hugging_face=biases, rows=rows, order=order))
    return rules


def norm(megatron: str, hugging_face: str, model: ModelConfig) -> list[Rule]:
    """A norm's weight and, for LayerNorm, its bias; ``megatron`` ends where ``weight`` begins."""
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return [Rule(megatron=megatron + kind, hugging_face=(f"{hugging_face}.{kind}",)) for kind in kinds]


def absolute_positions(name: str) -> list[Rule]:
    """The table of learned positions, called ``name`` there, without ``.weight``."""
    return [Rule(megatron=POSITIONS, hugging_face=(name + ".weight",))]


def _head(model: ModelConfig) -> list[Rule]:
    """The output layer, if it is not the embedding."""
    if model.share_embeddings_and_output_weights:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=("lm_head.weight",))]


def llama_family(
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
        rules=llama_rules,
        architectures={"causal_lm": architecture},
        base_prefix="model.",
        buffers=("*.rotary_emb.inv_freq",),
    )
