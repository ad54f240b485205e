"""The table of all decoders: what their configs call alike, and the names of their weights; rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.convert.family import LAYER, POSITIONS, Family, Rule, activation, qkv_order
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, RopeScaling

LAYERS = "decoder.layers."
ATTENTION, MLP = LAYERS + "self_attention.", LAYERS + "mlp."
INPUT_NORM, MLP_NORM = ATTENTION + "linear_qkv.layer_norm_", MLP + "linear_fc1.layer_norm_"


# ---- configs --------------------------------------------------------------------------------------------------------

_SAID_ALIKE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
"""Fields of a ``ModelConfig``, and what most Hugging Face configs call them."""

LLAMA: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
"""How Llama's mathematics differ from GPT-2's, besides rotary positions."""


def described(hf: Any, own: Mapping[str, Any]) -> ModelConfig:
    """A decoder whose config has the usual names, where ``own`` has no field.

    ``pad_token_id`` is not among them: Hugging Face does not train that row of the input embedding, we do where the
    token stands in a sentence. Padding is told by the mask, and where it is, no row gets a gradient.

    Raises:
        ConfigError: If the activation is not known.
    """
    fields = {ours: getattr(hf, theirs) for ours, theirs in _SAID_ALIKE.items() if ours not in own}
    if "activation" not in own:
        fields["activation"] = activation(hf.hidden_act)
    fields["kv_channels"] = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return ModelConfig(**{"family": hf.model_type, "scaled_residual_init": False, **fields, **own})


def windows(hf: Any) -> dict[str, Any]:
    """Which layers see how far back, from ``layer_types``, as fields of a ``ModelConfig``.

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
    """A norm's weight and, for most LayerNorms, its bias; ``megatron`` ends where ``weight`` begins."""
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" and model.norm_bias else ("weight",)
    return [Rule(megatron=megatron + kind, hugging_face=(f"{hugging_face}.{kind}",)) for kind in kinds]


def output_layer(model: ModelConfig, name: str = "lm_head") -> list[Rule]:
    """The output layer, if it is not the embedding."""
    if model.share_embeddings_and_output_weights:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=(f"{name}.weight",))]


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Hugging Face's names in a decoder, without ``.weight``; by default Llama's. Which ones exist, the model says."""

    base: str = "model."
    """What the names of the headless model begin with."""
    embedding: str = "embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = "norm"
    layer: str = f"layers.{LAYER}."
    """What the following names begin with."""
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one."""
    is_in_megatrons_order: bool = False
    """Whether one matrix has each group's queries, key and value together, not all queries, all keys, all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    post_attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one matrix."""
    fc2: str = "mlp.down_proj"
    post_mlp_norm: str = "post_feedforward_layernorm"
    output: str = "lm_head"
    is_transposed: bool = False
    """Whether the layers' matrices are kept transposed."""


def decoder_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """All weights of a decoder."""
    hf, transposed = names.base + names.layer, names.is_transposed
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    order = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)

    def fused(parts: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, Any]:
        return {"hugging_face": tuple(hf + part for part in parts), "rows": rows if len(parts) > 1 else ()}

    qkv, fc1 = fused(names.qkv, (queries, keys, keys)), fused(names.fc1, (model.ffn_hidden_size,) * 2)
    qkv["order"] = None if names.is_in_megatrons_order else order
    proj, has_proj_bias = ATTENTION + "linear_proj", model.has_attention_output_bias
    rules = [
        Rule(megatron="embedding.word_embeddings.weight", hugging_face=(f"{names.base}{names.embedding}.weight",)),
        *norm("decoder.final_layernorm.", names.base + names.final_norm, model),
        *linear(ATTENTION + "linear_qkv", has_bias=model.add_qkv_bias, transposed=transposed, **qkv),
        *linear(proj, (hf + names.proj,), has_proj_bias, transposed=transposed),
        *linear(MLP + "linear_fc1", has_bias=model.add_bias_linear, transposed=transposed, **fc1),
        *linear(MLP + "linear_fc2", (hf + names.fc2,), model.add_bias_linear, transposed=transposed),
        *output_layer(model, names.output),
    ]
    optional = {
        "embedding.norm.": (model.embedding_layernorm, names.base + names.embedding_norm),
        INPUT_NORM: (model.pre_norms, hf + names.input_norm),
        MLP_NORM: (model.has_mlp_norm, hf + names.mlp_norm),
        ATTENTION + "q_layernorm.": (model.qk_layernorm, hf + names.q_norm),
        ATTENTION + "k_layernorm.": (model.qk_layernorm, hf + names.k_norm),
        ATTENTION + "linear_proj.post_layernorm.": (model.post_norms, hf + names.post_attention_norm),
        MLP + "linear_fc2.post_layernorm.": (model.post_norms, hf + names.post_mlp_norm),
    }
    for megatron, (exists, hugging_face) in optional.items():
        rules += norm(megatron, hugging_face, model) if exists else []
    if names.positions:
        rules += linear(POSITIONS.removesuffix(".weight"), (names.base + names.positions,))
    return rules


LLAMA_NAMES = DecoderNames()


def decoder(
    model_type: str,
    architecture: str,
    describe: Callable[[Any], ModelConfig],
    names: DecoderNames = LLAMA_NAMES,
    required: Mapping[str, tuple[Any, ...]] | None = None,
    old_names: Mapping[str, str] | None = None,
) -> Family:
    """A family of decoders; the arguments are those of ``Family``, the class with the head, and the weights' names."""
    return Family(
        model_type=model_type,
        describe=describe,
        required=required or {},
        rules=lambda model: decoder_rules(names, model),
        architectures={"causal_lm": architecture},
        base_prefix=names.base,
        old_names=old_names or {},
        # Of any family, in old files: tables of positions and masks.
        buffers=(
            *("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias"),
            *("*.attention.bias", "*.attention.masked_bias"),
        ),
    )


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
    rope_parameters: Mapping[str, Any] | None, max_position_embeddings: int, *, may_be_partial: bool = False
) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling of the frequencies.

    Args:
        rope_parameters: As a Hugging Face config object has them.
        max_position_embeddings: The config's.
        may_be_partial: Whether Hugging Face's model of the family reads ``partial_rotary_factor``.

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
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not may_be_partial:
        raise ConfigError(
            f"partial_rotary_factor={rope['partial_rotary_factor']} of rope_parameters is not supported; "
            "Hugging Face's model of this family rotates whole heads, use 1.0"
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


def rope_fields(hf: Any, *, may_be_partial: bool = False) -> dict[str, Any]:
    """Rotary positions, as fields of a ``ModelConfig``.

    Raises:
        ConfigError: If ``rope_parameters`` cannot be honoured.
    """
    base, scaling = read_rope(hf.rope_parameters, hf.max_position_embeddings, may_be_partial=may_be_partial)
    percent = (hf.rope_parameters or {}).get("partial_rotary_factor") if may_be_partial else None
    fields = {"position_embedding_type": "rope", "rotary_base": base, "rope_scaling": scaling}
    return fields if percent is None else {**fields, "rotary_percent": float(percent)}
