"""Layers of Megatron-Core's ``HybridModel``, which has one layer for each attention and each MLP.

It takes the place of ``GPTModel``, which megatron-core 0.19 deprecates (models/hybrid/hybrid_block.py, HybridStack). A
layer of ``GPTModel``, and of the models here, has both parts under one index, so layers 2 n and 2 n + 1 become layer n.
``Symbols`` of hybrid_layer_allocation.py names the kinds of layers: ``*`` is attention, ``-`` an MLP, ``M`` Mamba.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from lightning_megatron.convert.shards import Key
from lightning_megatron.errors import CheckpointError

Value = TypeVar("Value")

FINAL_NORM = "decoder.final_norm."
"""Prefix of the last norm, which ``GPTModel`` calls ``decoder.final_layernorm``."""
_FINAL_LAYERNORM = "decoder.final_layernorm."
_LAYERS = "decoder.layers."
_ATTENTION = "*"
_MLP = "-"
_KINDS = {
    "input_layernorm": _ATTENTION,
    "self_attention": _ATTENTION,
    "mlp": _MLP,
    "pre_mlp_layernorm": _MLP,
    "mixer": "M",
}
"""Kind of a layer by the modules that it has."""
_UNKNOWN = "?"
_MAX_SHOWN = 40


def is_hybrid(names: Iterable[str]) -> bool:
    """Whether these are names of tensors of a ``HybridModel``, without those of wrappers around it."""
    return any(name.startswith(FINAL_NORM) for name in names)


def layer_pattern(keys: Iterable[Key]) -> str:
    """Kinds of the layers in their order, as the engine's ``hybrid_layer_pattern`` has them, without stages.

    A layer with modules of several kinds, or of an unknown one, is ``?``, and so is one without tensors.
    """
    kinds: dict[int, set[str]] = {}
    for key in keys:
        if key.layer is not None:
            module = key.name.removeprefix(_LAYERS).partition(".")[0]
            kinds.setdefault(key.layer, set()).add(_KINDS.get(module, _UNKNOWN))
    pattern = ""
    for position, layer in enumerate(sorted(kinds)):
        is_known = layer == position and len(kinds[layer]) == 1
        pattern += min(kinds[layer]) if is_known else _UNKNOWN
    return pattern


def with_paired_layers(found: Mapping[Key, Value], path: Path) -> dict[Key, Value]:
    """Give the tensors of a ``HybridModel`` the keys that they have in a ``GPTModel``.

    Args:
        found: What is known of each tensor.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: If the layers are not an attention and an MLP in turn.
    """
    pattern = layer_pattern(found)
    num_pairs = len(pattern) // 2
    if pattern != (_ATTENTION + _MLP) * num_pairs:
        shown = pattern[:_MAX_SHOWN]
        raise CheckpointError(
            f"{path}: expected a HybridModel with an attention (*) and an MLP (-) in turn, as the layers of known "
            f"families have them, got {shown!r} (M: Mamba, ?: another kind, several kinds, or no tensors); no family "
            "computes that model"
        )
    paired = {}
    for key, value in found.items():
        name = key.name
        if name.startswith(FINAL_NORM):
            name = _FINAL_LAYERNORM + name.removeprefix(FINAL_NORM)
        layer = key.layer
        if layer is not None:
            layer //= 2
        paired[Key(name, layer, key.expert)] = value
    return paired
