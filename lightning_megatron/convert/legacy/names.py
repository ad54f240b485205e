"""What is a tensor called in legacy Megatron-LM checkpoints, and which of its axes does tensor parallelism split?

One table serves both directions. Names are written as Megatron-LM of 2023 (checkpoint version 3.0) wrote them, and read
as any release did: NVIDIA's first ones, those with Transformer Engine's fused modules, and Megatron-Core's own names,
which ``--ckpt-format torch`` puts into the same files.

Here a name is flat: the keys of the nested dictionaries, joined with dots, below ``model`` (or ``model0``, ``model1``):
``language_model.encoder.layers.3.self_attention.query_key_value.weight``. ``nested_path`` says how it is nested.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.convert.stored.base import Key
from lightning_megatron.models.config import Architecture

HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of tied embeddings; the same numbers as the first stage's."""


@dataclass(frozen=True, kw_only=True)
class ModuleName:
    """A module with a weight and perhaps a bias, in both namings: what stands before ``weight`` and ``bias``."""

    megatron: str
    """Megatron-Core's, as the rules of families have it."""
    legacy: str
    """As it is written."""
    also: tuple[str, ...] = ()
    """Names of other releases, which are read, too."""
    axis: Literal[0, 1] | None = None
    """Axis of the weight that tensor parallelism splits; the bias is split if it is 0. None: every rank has all."""


_OF_A_LAYER = (
    ModuleName(
        megatron="self_attention.linear_qkv.layer_norm_",
        legacy="input_layernorm.",
        also=("input_norm.", "self_attention.layernorm_qkv.layer_norm_"),
    ),
    ModuleName(
        megatron="self_attention.linear_qkv.",
        legacy="self_attention.query_key_value.",
        also=("attention.query_key_value.", "self_attention.layernorm_qkv."),
        axis=0,
    ),
    ModuleName(
        megatron="self_attention.linear_proj.",
        legacy="self_attention.dense.",
        also=("attention.dense.", "self_attention.proj."),
        axis=1,
    ),
    ModuleName(megatron="self_attention.q_layernorm.", legacy="self_attention.q_layernorm."),
    ModuleName(megatron="self_attention.k_layernorm.", legacy="self_attention.k_layernorm."),
    ModuleName(megatron="mlp.linear_fc1.", legacy="mlp.dense_h_to_4h.", also=("layernorm_mlp.fc1_",), axis=0),
    ModuleName(megatron="mlp.linear_fc2.", legacy="mlp.dense_4h_to_h.", also=("layernorm_mlp.fc2_",), axis=1),
)
_MLP_NORM = ModuleName(
    megatron="mlp.linear_fc1.layer_norm_",
    legacy="post_attention_layernorm.",
    also=("post_attention_norm.", "layernorm_mlp.layer_norm_", "pre_mlp_layernorm."),
)
_OF_A_CROSS_ATTENTION = (
    ModuleName(
        megatron="pre_cross_attn_layernorm.", legacy="post_attention_layernorm.", also=("post_attention_norm.",)
    ),
    ModuleName(megatron="cross_attention.linear_q.", legacy="inter_attention.query.", axis=0),
    ModuleName(megatron="cross_attention.linear_kv.", legacy="inter_attention.key_value.", axis=0),
    ModuleName(megatron="cross_attention.linear_proj.", legacy="inter_attention.dense.", axis=1),
    ModuleName(
        megatron="mlp.linear_fc1.layer_norm_",
        legacy="post_inter_attention_layernorm.",
        also=("post_inter_attention_norm.", "pre_mlp_layernorm."),
    ),
)
"""Of a layer that reads an encoder's output: its MLP's norm has another name, and the usual one is that before the
cross-attention."""

_FINAL_NORM = ModuleName(megatron="final_layernorm.", legacy="final_layernorm.", also=("final_norm.",))
_OUTSIDE = (
    ModuleName(megatron="embedding.word_embeddings.", legacy="language_model.embedding.word_embeddings.", axis=0),
    ModuleName(megatron="embedding.position_embeddings.", legacy="language_model.embedding.position_embeddings."),
    ModuleName(megatron="embedding.tokentype_embeddings.", legacy="language_model.embedding.tokentype_embeddings."),
    ModuleName(megatron="embedding.norm.", legacy="language_model.embedding.norm."),
    ModuleName(megatron="pooler.dense.", legacy="language_model.pooler.dense."),
    ModuleName(megatron="lm_head.dense.", legacy="lm_head.dense."),
    ModuleName(megatron="lm_head.layer_norm.", legacy="lm_head.layernorm.", also=("lm_head.norm.",)),
    ModuleName(megatron="binary_head.", legacy="binary_head."),
    ModuleName(megatron="classification_head.dense.", legacy="classification_head."),
    ModuleName(megatron="token_head.dense.", legacy="token_head."),
    # T5's tables of relative positions; Megatron-LM has them under Megatron-Core's names only.
    *(
        ModuleName(
            megatron=f"{stack}_relative_pos_emb.relative_attention_bias.",
            legacy=f"language_model.{stack}_relative_pos_emb.relative_attention_bias.",
        )
        for stack in ("encoder", "decoder")
    ),
)
_TENSORS_OUTSIDE = {
    "output_layer.weight": ("language_model.output_layer.weight",),
    "output_layer.bias": ("lm_head.bias", "lm_head.output_layer.bias"),
}
"""Of an output layer, whose weight and bias are in different places; split along axis 0, as the embedding is."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Tensors with a row for each token, and with rows that pad the vocabulary."""

_NO_WEIGHTS = re.compile(r"(^|\.)(_extra_state|inv_freq|masked_bias|position_ids|attention\.bias)$|\._extra_state")
"""Buffers that some release put among the weights."""
_NUMBER = re.compile(r"^(.*?\blayers)\.(\d+)\.(.*)$")
_LAST_OF_NESTED = re.compile(
    r"^language_model\.(?:embedding\.\w+|\w+)\.|^(?:lm_head|binary_head|classification_head|token_head)\."
    r"|^word_embeddings_for_head\."
)


def is_weight(legacy: str) -> bool:
    """Whether a tensor of a checkpoint is one that training changes."""
    return _NO_WEIGHTS.search(legacy) is None


def key_of(legacy: str, architecture: Architecture) -> Key | None:
    """What Megatron-Core calls the tensor ``legacy``; its layer is counted from 0 in the file. None if unknown."""
    numbered = _NUMBER.match(legacy)
    pattern = f"{numbered[1]}.{numbered[3]}" if numbered else legacy
    name = _read_as(architecture).get(pattern)
    return None if name is None else Key(name, int(numbered[2]) if numbered else None)


def legacy_name(key: Key, architecture: Architecture) -> str:
    """The flat name under which ``key`` is written, its layer counted as ``key.layer`` says.

    Raises:
        KeyError: If there is none.
    """
    name = _written_as(architecture)[key.name]
    return name if key.layer is None else name.replace(".layers.", f".layers.{key.layer}.", 1)


def nested_path(legacy: str) -> tuple[str, ...]:
    """The keys of the nested dictionaries: ("language_model", "encoder", "layers.0.input_layernorm.weight")."""
    outer = _LAST_OF_NESTED.match(legacy)
    return (legacy,) if outer is None else (*outer[0][:-1].split("."), legacy[outer.end() :])


def split_axis(name: str) -> Literal[0, 1] | None:
    """Along which axis tensor parallelism splits a tensor with Megatron-Core's name (without a layer's number)."""
    return _axes()[name]


def _modules(architecture: Architecture) -> Iterator[tuple[ModuleName, str, tuple[str, ...]]]:
    """Every module, with what Megatron-Core's and each legacy name begin with; the first legacy one is written."""
    for module in _OUTSIDE:
        yield module, "", ("",)
    stacks: Mapping[str, tuple[str, ...]] = {"encoder": ("encoder", "transformer"), "decoder": ("decoder",)}
    if architecture == "gpt":
        stacks = {"decoder": stacks["encoder"]}
    elif architecture == "bert":
        stacks = {"encoder": stacks["encoder"]}
    for stack, names in stacks.items():
        has_cross_attention = architecture == "t5" and stack == "decoder"
        begins = tuple(f"language_model.{name}." for name in names)
        yield _FINAL_NORM, f"{stack}.", begins
        for module in (*_OF_A_LAYER, *(_OF_A_CROSS_ATTENTION if has_cross_attention else (_MLP_NORM,))):
            yield module, f"{stack}.layers.", tuple(f"{begin}layers." for begin in begins)


@functools.cache
def _read_as(architecture: Architecture) -> Mapping[str, str]:
    """Megatron-Core's name of every name that some release wrote, Megatron-Core's own included."""
    names = {}
    for module, stack, begins in _modules(architecture):
        for kind in ("weight", "bias"):
            for begin in (*begins, stack):
                for each in (module.legacy, *module.also, module.megatron):
                    names[f"{begin}{each}{kind}"] = f"{stack}{module.megatron}{kind}"
    for name, others in _TENSORS_OUTSIDE.items():
        names |= dict.fromkeys((name, *others), name)
    return names


@functools.cache
def _written_as(architecture: Architecture) -> Mapping[str, str]:
    names = {
        f"{stack}{module.megatron}{kind}": f"{begins[0]}{module.legacy}{kind}"
        for module, stack, begins in _modules(architecture)
        for kind in ("weight", "bias")
    }
    return names | {name: others[0] for name, others in _TENSORS_OUTSIDE.items()}


@functools.cache
def _axes() -> Mapping[str, Literal[0, 1] | None]:
    axes: dict[str, Literal[0, 1] | None] = {}
    for architecture in ("gpt", "bert", "t5"):
        for module, stack, _ in _modules(architecture):
            axes[f"{stack}{module.megatron}weight"] = module.axis
            axes[f"{stack}{module.megatron}bias"] = 0 if module.axis == 0 else None
    return axes | dict.fromkeys(_TENSORS_OUTSIDE, 0)
