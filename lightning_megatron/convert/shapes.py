"""Which tensors does a model have, in which order, and of which shapes? From its description, without building it."""

from __future__ import annotations

import torch

from lightning_megatron.convert.pieces import Place
from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.models.config import ModelConfig

_OF_LAYERS = ".layers."


def tensor_shapes(model: ModelConfig) -> dict[Key, tuple[int, ...]]:
    """The shape of each weight of ``model``, without rows that pad the vocabulary.

    Returns:
        Tensors of no layer first, then each stack (T5's encoder before its decoder) layer after layer.
    """
    stacks: dict[str, list[Rule]] = {"": []}
    for rule in rules_of(model):
        stacks.setdefault(_stack_of(rule.megatron), []).append(rule)
    shapes = {Key(rule.megatron, None): _shape(rule.megatron, model) for rule in stacks.pop("")}
    for stack, rules in stacks.items():
        for layer in range(num_layers(stack, model)):
            shapes |= {Key(rule.megatron, layer): _shape(rule.megatron, model) for rule in rules}
    return shapes


def num_layers(stack: str, model: ModelConfig) -> int:
    """Layers of the stack ``encoder`` or ``decoder``."""
    return model.num_decoder_layers if model.architecture == "t5" and stack == "decoder" else model.num_layers


def rules_by_name(model: ModelConfig) -> dict[str, Rule]:
    """The rule of each ``Key.name``."""
    return {rule.megatron: rule for rule in rules_of(model)}


def rows_of(shape: tuple[int, ...], start: int, stop: int, dtype: torch.dtype) -> Place:
    """Rows ``start`` to ``stop`` of a whole tensor as a shard of it, for the arithmetic of ``pieces.py``."""
    return Place(
        rule=0,
        layer=None,
        shape=shape,
        offset=(start, *(0 for _ in shape[1:])),
        size=(stop - start, *shape[1:]),
        dtype=dtype,
    )


def _stack_of(name: str) -> str:
    return name.split(_OF_LAYERS)[0] if _OF_LAYERS in name else ""


def _shape(name: str, model: ModelConfig) -> tuple[int, ...]:
    if name.endswith(("norm.weight", "norm.bias", "layer_norm_weight", "layer_norm_bias")):
        return (
            model.kv_channels if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) else model.hidden_size,
        )
    module, kind = name.rsplit(".", 1)
    rows, columns = _matrix(module.removeprefix("encoder_").removeprefix("decoder_").rsplit(".layers.")[-1], model)
    return (rows, columns) if kind == "weight" else (rows,)


def _matrix(module: str, model: ModelConfig) -> tuple[int, int]:
    """Rows and columns of the matrix of a module, named from its layer on."""
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    width = heads * model.kv_channels
    sizes = {
        "embedding.word_embeddings": (model.vocab_size, hidden),
        "embedding.position_embeddings": (model.max_position_embeddings, hidden),
        "embedding.tokentype_embeddings": (model.num_tokentypes, hidden),
        "relative_pos_emb.relative_attention_bias": (model.relative_attention_num_buckets, heads),
        "self_attention.linear_qkv": (width + 2 * groups * model.kv_channels, hidden),
        "self_attention.linear_proj": (hidden, width),
        "cross_attention.linear_q": (width, hidden),
        "cross_attention.linear_kv": (2 * width, hidden),
        "cross_attention.linear_proj": (hidden, width),
        "mlp.linear_fc1": ((1 + model.gated_linear_unit) * model.ffn_hidden_size, hidden),
        "mlp.linear_fc2": (hidden, model.ffn_hidden_size),
        "output_layer": (model.vocab_size, hidden),
        "lm_head.dense": (hidden, hidden),
        "pooler.dense": (hidden, hidden),
        "binary_head": (2, hidden),
        "classification_head.dense": (model.num_labels, hidden),
        "token_head.dense": (model.num_labels, hidden),
    }
    if module not in sizes:
        raise KeyError(f"the shape of {module} is not known; add it to convert/shapes.py")
    return sizes[module]
