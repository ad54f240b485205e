"""Rules of the weights of a stack of layers, by the names that a family gives to its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_megatron.convert.rules import (
    EXPERT,
    LAYER,
    POSITIONS,
    Rule,
    grouped_order,
    qkv_order,
)
from lightning_megatron.models.config import Experts, LatentAttention, LinearAttention, ModelConfig

_EXPERTS = "decoder.layers.mlp.experts.experts"
"""Megatron's module of all experts of a layer."""


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    """Names of tensors that hold all experts of a layer, in the mixture's module; a bias has the suffix ``_bias``."""

    fc1: str = "experts.gate_up_proj"
    fc2: str = "experts.down_proj"
    is_transposed: bool
    """Whether matrices are stored transposed: [experts, in, out]."""
    is_interleaved: bool
    """Whether outputs of gate and up take turns, instead of all of gate before all of up."""


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Hugging Face's module names in a stack of layers; the model config decides which of them exist."""

    base: str = "model."
    """Prefix of the headless model's names in files of a model with a head."""
    nested_base: str = ""
    """Prefix in place of ``base`` in files of a larger model, e.g. of images and texts; empty if there are none."""
    embedding: str = "embed_tokens"
    positions: str = "position_embeddings"
    """Learned position embeddings; in most families only variants (models/config.py) have them."""
    embedding_norm: str = ""
    final_norm: str = "norm"
    layer: str = f"layers.{LAYER}."
    """Prefix of the names below."""
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one fused matrix."""
    is_megatron_order: bool = False
    """Whether a fused matrix is in Megatron's order, by query group, not all queries, all keys, all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    linear_attention: str = "linear_attn"
    """Module of linear attention."""
    in_proj: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    """Its projections. Two (queries, keys, values, gates; rates, decays) are grouped by key head, four are not."""
    post_attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one fused or ungated matrix."""
    fc2: str = "mlp.down_proj"
    activation: str = "mlp.act_fn"
    """Activation function of the MLP, if it has parameters."""
    post_mlp_norm: str = "post_feedforward_layernorm"
    experts: str = "mlp"
    """Module of the mixture of experts, which has ``experts.N``."""
    router: str = "gate"
    """Router, in that of the mixture."""
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of each expert."""
    stacked_experts: StackedExperts | None = None
    """Tensors of all experts of a layer; None for tensors of each."""
    selection_bias: str = "gate.e_score_correction_bias"
    """Bias by which experts are selected, in the module of the mixture."""
    selection_bias_axes: int = 1
    """Axes of its tensor: [experts], or [1, experts] for 2."""
    shared_expert: str = "shared_expert"
    """Module of the shared expert, in that of the mixture."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Modules with other names in transformers than on the hub, besides those of experts, and their names there."""
    output: str = "lm_head"
    """Output layer in files; transformers 5 renames it to lm_head when reading them."""
    is_transposed: bool = False
    """Whether the matrices of the layers are stored transposed."""


def linear(
    megatron: str,
    hugging_face: tuple[str, ...],
    has_bias: bool = False,
    *,
    rows: tuple[int, ...] = (),
    order: torch.Tensor | None = None,
    transposed: bool = False,
) -> list[Rule]:
    """Rules of a linear layer: weight and, if ``has_bias``, bias; arguments as in ``Rule``, without ``.weight``."""
    weight = Rule(
        megatron=megatron + ".weight",
        hugging_face=tuple(f"{name}.weight" for name in hugging_face),
        rows=rows,
        order=order,
        transposed=transposed,
    )
    if not has_bias:
        return [weight]
    bias = Rule(
        megatron=megatron + ".bias",
        hugging_face=tuple(f"{name}.bias" for name in hugging_face),
        rows=rows,
        order=order,
    )
    return [weight, bias]


def norm(
    megatron: str,
    hugging_face: str,
    model: ModelConfig,
) -> list[Rule]:
    """Rules of a norm: weight and, for most LayerNorms, bias; ``megatron`` is the name up to ``weight``."""
    kinds = ["weight"]
    if model.normalization == "LayerNorm" and model.norm_bias:
        kinds.append("bias")
    return [
        Rule(megatron=megatron + kind, hugging_face=(f"{hugging_face}.{kind}",)) for kind in kinds
    ]


def output_layer(model: ModelConfig, name: str = "lm_head") -> list[Rule]:
    """Rule of the output layer; none if it is tied to the embedding, or the model has another head."""
    if model.share_embeddings_and_output_weights or not model.has_output_layer:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=(f"{name}.weight",))]


_CLASSIFIERS = {
    "sequence_classification": "classification_head.dense",
    "token_classification": "token_head.dense",
}
"""Megatron's name of the linear layer of each task's head."""


def head_rules(model: ModelConfig, module: str) -> list[Rule]:
    """Rules of a decoder's classification head, whose linear layer Hugging Face calls ``module``."""
    return linear(_CLASSIFIERS[model.task], (module,), model.classifier_bias)


def stack_rules(
    names: DecoderNames,
    model: ModelConfig,
    stack: str = "decoder",
) -> list[Rule]:
    """Rules of a stack (``encoder`` or ``decoder``): attention and MLP of its layers, and its final norm."""
    hf = names.base + names.layer
    attention = f"{stack}.layers.self_attention."
    mlp = f"{stack}.layers.mlp."
    transposed = names.is_transposed
    rules = [
        *norm(f"{stack}.final_layernorm.", names.base + names.final_norm, model),
        *_projections(names, model, stack),
        *linear(
            attention + "linear_proj",
            (hf + names.proj,),
            model.has_attention_output_bias,
            transposed=transposed,
        ),
        *linear(
            mlp + "linear_fc1",
            tuple(hf + part for part in names.fc1),
            model.add_bias_linear,
            rows=(model.ffn_hidden_size,) * 2 if len(names.fc1) > 1 else (),
            transposed=transposed,
        ),
        *linear(
            mlp + "linear_fc2",
            (hf + names.fc2,),
            model.add_bias_linear,
            transposed=transposed,
        ),
    ]
    if model.latent_attention is not None:
        rules += norm(f"{stack}.layers.input_layernorm.", hf + names.input_norm, model)
    elif model.pre_norms:
        rules += norm(attention + "linear_qkv.layer_norm_", hf + names.input_norm, model)
    if model.has_mlp_norm:
        rules += norm(mlp + "linear_fc1.layer_norm_", hf + names.mlp_norm, model)
    if model.qk_layernorm:
        kind = "rotated_" if model.qk_layernorm_after_rotary else ""
        rules += norm(f"{attention}{kind}q_layernorm.", hf + names.q_norm, model)
        rules += norm(f"{attention}{kind}k_layernorm.", hf + names.k_norm, model)
    if model.linear_attention is not None:
        rules += _linear_attention_rules(names, model, model.linear_attention)
    if model.activation == "xielu":
        rules += _xielu_rules(f"{mlp}activation_func", hf + names.activation)
    if model.attention_sinks:
        sinks = Rule(
            megatron=f"{attention}core_attention.softmax_offset",
            hugging_face=(hf + names.sinks,),
        )
        rules.append(sinks)
    if model.post_norms:
        after_attention = hf + names.post_attention_norm
        rules += norm(attention + "linear_proj.post_layernorm.", after_attention, model)
        rules += norm(mlp + "linear_fc2.post_layernorm.", hf + names.post_mlp_norm, model)
    return rules


def _xielu_rules(megatron: str, hugging_face: str) -> list[Rule]:
    """Rules of parameters and constants of an activation function, in modules of these names."""
    alphas = Rule(
        megatron=f"{megatron}.alphas",
        hugging_face=(f"{hugging_face}.alpha_p", f"{hugging_face}.alpha_n"),
        rows=(1, 1),
    )
    constants = [
        Rule(
            megatron=f"{megatron}.{name}",
            hugging_face=(f"{hugging_face}.{name}",),
            stored_shape=(),
        )
        for name in ("beta", "eps")
    ]
    return [alphas, *constants]


def _projections(names: DecoderNames, model: ModelConfig, stack: str) -> list[Rule]:
    """Rules of the projections to queries, keys and values."""
    hf = names.base + names.layer
    if model.latent_attention is not None:
        return _latent_projections(model, model.latent_attention, hf + "self_attn.")
    queries = model.query_rows
    keys = model.num_query_groups * model.kv_channels
    order = None
    if not names.is_megatron_order:
        order = qkv_order(
            model.num_attention_heads,
            model.num_query_groups,
            model.kv_channels,
            has_gates=model.attention_output_gate,
        )
    return linear(
        f"{stack}.layers.self_attention.linear_qkv",
        tuple(hf + part for part in names.qkv),
        model.add_qkv_bias,
        rows=(queries, keys, keys) if len(names.qkv) > 1 else (),
        order=order,
        transposed=names.is_transposed,
    )


def _latent_projections(
    model: ModelConfig,
    latent: LatentAttention,
    hf: str,
) -> list[Rule]:
    """Rules of queries, keys and values of latent attention, in module ``hf``; their norms are fused."""
    attention = "decoder.layers.self_attention."
    if latent.q_lora_rank is None:
        rules = linear(attention + "linear_q_proj", (hf + "q_proj",))
    else:
        rules = [
            *linear(attention + "linear_q_down_proj", (hf + "q_a_proj",), latent.add_bias),
            *norm(attention + "linear_q_up_proj.layer_norm_", hf + "q_a_layernorm", model),
            *linear(attention + "linear_q_up_proj", (hf + "q_b_proj",)),
        ]
    down = hf + "kv_a_proj_with_mqa"
    return [
        *rules,
        *linear(attention + "linear_kv_down_proj", (down,), latent.add_bias),
        *norm(attention + "linear_kv_up_proj.layer_norm_", hf + "kv_a_layernorm", model),
        *linear(attention + "linear_kv_up_proj", (hf + "kv_b_proj",)),
    ]


def _linear_attention_rules(
    names: DecoderNames,
    model: ModelConfig,
    linear_attention: LinearAttention,
) -> list[Rule]:
    """Rules of layers with linear attention; rows of their projection and convolution are ordered by key head."""
    hf = names.base + names.layer
    module = f"{hf}{names.linear_attention}."
    attention = "decoder.layers.self_attention."
    groups = linear_attention.num_key_heads
    key, _, value, gate, rate, decay = linear_attention.sizes
    rows: tuple[int, ...] = (2 * key + value, gate, rate, decay)
    parts: tuple[int, ...] = linear_attention.sizes
    if len(names.in_proj) == 2:
        rows = parts = (2 * key + value + gate, rate + decay)
    convolution = Rule(
        megatron=attention + "conv1d.weight",
        hugging_face=(f"{module}conv1d.weight",),
        order=grouped_order((key, key, value), groups),
    )
    vectors = [
        Rule(megatron=attention + name, hugging_face=(module + name,))
        for name in ("A_log", "dt_bias")
    ]
    return [
        *norm(attention + "in_proj.layer_norm_", hf + names.input_norm, model),
        *linear(
            attention + "in_proj",
            tuple(module + name for name in names.in_proj),
            rows=rows,
            order=grouped_order(parts, groups),
        ),
        convolution,
        *vectors,
        *norm(attention + "out_norm.", module + "norm", model),
        *linear(attention + "out_proj", (f"{module}out_proj",)),
    ]


def decoder_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """Rules of all weights of a decoder-only model."""
    rules = [
        *linear("embedding.word_embeddings", (names.base + names.embedding,)),
        *stack_rules(names, model),
    ]
    rules += output_layer(model, names.output)
    if model.embedding_layernorm:
        rules += norm("embedding.norm.", names.base + names.embedding_norm, model)
    if model.position_embedding_type == "learned_absolute":
        rules += linear(POSITIONS.removesuffix(".weight"), (names.base + names.positions,))
    return rules + _expert_rules(names, model)


def _expert_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """Rules of the layers with experts instead of an MLP; their norm is not fused into the first linear layer."""
    experts = model.experts
    if experts is None:
        return []
    hf = names.base + names.layer
    block = hf + names.experts
    mlp = "decoder.layers.mlp."
    rules = [
        *norm("decoder.layers.pre_mlp_layernorm.", hf + names.mlp_norm, model),
        *linear(mlp + "router", (f"{block}.{names.router}",), experts.add_bias),
    ]
    if names.stacked_experts is None:
        rules += _rules_of_each_expert(names, experts, block)
    else:
        rules += _rules_of_stacked_experts(names.stacked_experts, experts, block)
    if experts.has_selection_bias:
        bias = Rule(
            megatron=mlp + "router.expert_bias",
            hugging_face=(f"{block}.{names.selection_bias}",),
            stored_shape=_row_shape(experts.num_experts, names.selection_bias_axes),
        )
        rules.append(bias)
    width = experts.shared_ffn_hidden_size
    if width:
        shared = f"{block}.{names.shared_expert}"
        fc1 = (f"{shared}.gate_proj", f"{shared}.up_proj")
        rules += linear(mlp + "shared_experts.linear_fc1", fc1, rows=(width, width))
        rules += linear(mlp + "shared_experts.linear_fc2", (f"{shared}.down_proj",))
    if width and experts.has_shared_gate:
        gate_weight = Rule(
            megatron=mlp + "shared_experts.gate_weight",
            hugging_face=(f"{shared}_gate.weight",),
        )
        rules.append(gate_weight)
    return rules


def _row_shape(size: int, axes: int) -> tuple[int, ...] | None:
    """``Rule.stored_shape`` of a vector that is stored with this number of axes."""
    if axes == 1:
        return None
    return (*(1,) * (axes - 1), size)


def _rules_of_each_expert(names: DecoderNames, experts: Experts, block: str) -> list[Rule]:
    """Rules of experts with tensors of their own, in module ``block``."""
    gate, up, down = (f"{block}.experts.{EXPERT}.{name}" for name in names.expert)
    fc1 = linear(
        f"{_EXPERTS}.linear_fc1",
        (gate, up),
        experts.add_bias,
        rows=(experts.ffn_hidden_size,) * 2,
    )
    fc2 = linear(f"{_EXPERTS}.linear_fc2", (down,), experts.add_bias)
    return fc1 + fc2


def _rules_of_stacked_experts(
    stacked: StackedExperts,
    experts: Experts,
    block: str,
) -> list[Rule]:
    """Rules of experts in one tensor, in module ``block``."""
    order = None
    if stacked.is_interleaved:
        rows = torch.arange(2 * experts.ffn_hidden_size)
        order = torch.cat((rows[::2], rows[1::2]))
    rules = []
    for linear_name, name, row_order in (
        ("linear_fc1", stacked.fc1, order),
        ("linear_fc2", stacked.fc2, None),
    ):
        weight = Rule(
            megatron=f"{_EXPERTS}.{linear_name}.weight",
            hugging_face=(f"{block}.{name}",),
            order=row_order,
            transposed=stacked.is_transposed,
            num_stacked=experts.num_experts,
        )
        rules.append(weight)
        if experts.add_bias:
            bias = Rule(
                megatron=f"{_EXPERTS}.{linear_name}.bias",
                hugging_face=(f"{block}.{name}_bias",),
                order=row_order,
                num_stacked=experts.num_experts,
            )
            rules.append(bias)
    return rules
