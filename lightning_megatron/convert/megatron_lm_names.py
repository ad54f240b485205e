"""Names of tensors in legacy checkpoints of Megatron-LM, and in Megatron-Core."""

from __future__ import annotations

import re

from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.convert.shards import Key
from lightning_megatron.models.config import Architecture

HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of tied embeddings, with the same values as the first stage's."""
EMBEDDING, OUTPUT, OUTPUT_BIAS = (Key(name) for name in VOCABULARY)
HEADS = (
    "lm_head.",
    "pooler.",
    "binary_head.",
    "classification_head.",
    "token_head.",
    OUTPUT_BIAS.name,
)
"""Prefixes of tensors of BERT's heads; the task decides which of them a model has."""

_LAYER_NAMES = {
    "final_layernorm.": "final_layernorm. final_norm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm. input_norm. self_attention.layernorm_qkv.layer_norm_",
    "self_attention.linear_qkv.": (
        "self_attention.query_key_value. attention.query_key_value. self_attention.layernorm_qkv."
    ),
    "self_attention.linear_proj.": "self_attention.dense. attention.dense. self_attention.proj.",
    "mlp.linear_fc1.layer_norm_": (
        "post_attention_layernorm. post_attention_norm. pre_mlp_layernorm. layernorm_mlp.layer_norm_"
    ),
    "mlp.linear_fc1.": "mlp.dense_h_to_4h. layernorm_mlp.fc1_",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h. layernorm_mlp.fc2_",
}
"""Megatron-Core's name in a layer, before ``weight`` and ``bias``, to the legacy names; the first one is saved."""
_DECODER_NAMES = {
    **_LAYER_NAMES,
    "pre_cross_attn_layernorm.": "post_attention_layernorm.",
    "cross_attention.linear_q.": "inter_attention.query.",
    "cross_attention.linear_kv.": "inter_attention.key_value.",
    "cross_attention.linear_proj.": "inter_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_inter_attention_layernorm.",
}
"""Names in a decoder with cross-attention, where the norm of the MLP has another legacy name."""
_OTHER_NAMES = {
    "lm_head.layer_norm.": "lm_head.layernorm. lm_head.norm.",
    "classification_head.dense.": "classification_head.",
    "token_head.dense.": "token_head.",
    "output_layer.": "lm_head. lm_head.output_layer.",  # only its bias
}
_STACKED = re.compile(r"(encoder|transformer|decoder)\.(layers\.)?(?:(\d{1,9})\.)?(.+)")


def _translate(
    name: str,
    stack: str | None,
    architecture: Architecture,
    *,
    writes: bool,
) -> str:
    """Translate a legacy tensor name to Megatron-Core's or, with ``writes``, Megatron-Core's to the legacy name."""
    if stack is None:
        modules = _OTHER_NAMES
    elif stack == "decoder" and architecture == "t5":
        modules = _DECODER_NAMES
    else:
        modules = _LAYER_NAMES
    if writes:
        names = {core: legacy.split()[0] for core, legacy in modules.items()}
    else:
        names = {name: core for core, legacy in modules.items() for name in legacy.split()}
    for kind in ("weight", "bias"):
        if name.endswith(kind):
            module = name.removesuffix(kind)
            return names.get(module, module) + kind
    return names.get(name, name)


def legacy_key(legacy: str, architecture: Architecture) -> Key:
    """Megatron-Core's key of the legacy tensor name; the layer index counts from 0 in the file."""
    if legacy == HEAD_COPY:
        return EMBEDDING
    name = legacy.removeprefix("language_model.")
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        return Key(_translate(name, None, architecture, writes=False))
    if architecture == "gpt":
        stack = "decoder"
    elif architecture == "bert":
        stack = "encoder"
    else:
        stack = stacked[1].replace("transformer", "encoder")
    layers = stacked[2] or ""
    inside = _translate(stacked[4], stack, architecture, writes=False)
    layer = int(stacked[3]) if stacked[3] else None
    return Key(f"{stack}.{layers}{inside}", layer)


def legacy_name(key: Key, architecture: Architecture) -> str:
    """Flat legacy name to save a tensor under; the layer index counts from 0 in the file."""
    stacked = _STACKED.fullmatch(key.name)
    if stacked is None:
        is_in_language_model = key == OUTPUT or key.name.startswith("pooler.")
        if key.name.startswith(HEADS) and not is_in_language_model:
            return _translate(key.name, None, architecture, writes=True)
        return f"language_model.{key.name}"
    stack = stacked[1] if architecture == "t5" else "encoder"
    layers = "" if key.layer is None else f"layers.{key.layer}."
    inside = _translate(stacked[4], stacked[1], architecture, writes=True)
    return f"language_model.{stack}.{layers}{inside}"


def split_axis(name: str) -> int | None:
    """Axis along which tensor parallelism shards the tensor of this Megatron-Core name; None if it is replicated."""
    if name in VOCABULARY or re.search(r"\.linear_(?:qkv|q|kv|fc1)\.(?:weight|bias)$", name):
        return 0
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
        return 1
    return None
