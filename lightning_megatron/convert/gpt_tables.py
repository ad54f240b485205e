"""Pieces of the tables of several families: rules of modules, names of fused decoders, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.convert.family import LAYER, Rule
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling

LAYERS = "decoder.layers."
ATTENTION, MLP = LAYERS + "self_attention.", LAYERS + "mlp."
INPUT_NORM, MLP_NORM = ATTENTION + "linear_qkv.layer_norm_", MLP + "linear_fc1.layer_norm_"


# ---- rules ----------------------------------------------------------------------------------------------------------


def linear(
    megatron: str,
    hugging_face: tuple[str, ...],
    has_bias: bool = False,
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


def output_layer(model: ModelConfig) -> list[Rule]:
    """The output layer, if it is not the embedding."""
    if model.share_embeddings_and_output_weights:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=("lm_head.weight",))]


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
        *norm(INPUT_NORM, hf + names.input_norm, model),
        *linear(ATTENTION + "linear_qkv", (hf + names.qkv,), model.add_qkv_bias, order=order, transposed=transposed),
        *linear(ATTENTION + "linear_proj", (hf + names.proj,), model.has_attention_output_bias, transposed=transposed),
        *linear(MLP + "linear_fc1", (hf + names.fc1,), model.add_bias_linear, transposed=transposed),
        *linear(MLP + "linear_fc2", (hf + names.fc2,), model.add_bias_linear, transposed=transposed),
        *output_layer(model),
    ]
    if names.mlp_norm is not None:
        rules += norm(MLP_NORM, hf + names.mlp_norm, model)
    return rules


# ---- rotary positions -----------------------------------------------------------------------------------------------

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}

_KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
"""Some type of Hugging Face's reads them. A type that does not read one ignores it, and so do we."""


def read_rope(
    rope_parameters: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling of the frequencies.

    Args:
        rope_parameters: As a Hugging Face config object has them.
        max_position_embeddings: The config's.

    Raises:
        ConfigError: If a key or the type is not honoured.
    """
    # Hugging Face takes null for absent, except that a null ``truncate`` is false.
    rope = {k: v for k, v in (rope_parameters or {}).items() if v is not None or k == "truncate"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ConfigError(f"rope_type={kind!r} of rope_parameters is not supported; use one of {', '.join(_TYPES)}")
    unknown = sorted(set(rope) - _KNOWN)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}={rope[unknown[0]]!r} of rope_parameters is not supported; the known keys are "
            f"{', '.join(sorted(_KNOWN))}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope['partial_rotary_factor']} of rope_parameters is not supported; only whole "
            "heads are rotated, use 1.0"
        )
    base = float(rope.get("rope_theta", 10000.0))
    return base, None if kind == "default" else _scaling(kind, rope, max_position_embeddings)


def _scaling(kind: Any, rope: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling:
    for name in _NEEDED.get(kind, ()):
        if name not in rope:
            raise ConfigError(f"rope_parameters of the type {kind!r} have no {name!r}; add it")
    # The config's own length is what dynamic scaling starts from, whatever else the parameters say.
    original = max_position_embeddings if kind == "dynamic" else rope.get("original_max_position_embeddings")
    original = max_position_embeddings if original is None else int(original)
    factor = float(rope.get("factor", max_position_embeddings / original))
    fields: dict[str, Any] = {}
    if kind == "llama3":
        fields = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        fields = {name: tuple(float(x) for x in rope[name]) for name in ("short_factor", "long_factor")}
        fields["attention_factor"] = float(rope.get("attention_factor", _longrope_attention_factor(factor, original)))
    elif kind == "yarn":
        # Hugging Face takes 0 for absent, too.
        fields = {"beta_fast": float(rope.get("beta_fast") or 32), "beta_slow": float(rope.get("beta_slow") or 1)}
        fields["truncate"] = bool(rope.get("truncate", True))
        fields["attention_factor"] = float(rope.get("attention_factor", _yarn_attention_factor(factor, rope)))
    return RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **fields)


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Source: Ding et al. 2024, LongRoPE (arXiv 2402.13753), and Phi-3's code."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def _yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """Source: Peng et al. 2023, YaRN (arXiv 2309.00071), eq. 22; the two mscales are DeepSeek's."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def rope_fields(hf: Any) -> dict[str, Any]:
    """Theta and the scaling of rotary positions, as fields of a ``ModelConfig``.

    Raises:
        ConfigError: If ``rope_parameters`` cannot be honoured.
    """
    base, scaling = read_rope(hf.rope_parameters, hf.max_position_embeddings)
    return {"rotary_base": base, "rope_scaling": scaling}
