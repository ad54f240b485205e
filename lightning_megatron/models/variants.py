"""Describe GPTs that no Hugging Face config does: other positions, or other key/value heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig, PositionEmbedding

Positions: TypeAlias = Literal["absolute", "rotary", "alibi"]
AttentionHeads: TypeAlias = Literal["multihead", "multiquery"]

_POSITIONS: dict[str, PositionEmbedding] = {"absolute": "learned_absolute", "rotary": "rope", "alibi": "alibi"}


def with_variant(
    model: ModelConfig, position_embedding_type: str | None, attention_head_type: str | None
) -> ModelConfig:
    """``model`` with other positions and heads.

    Args:
        model: A GPT.
        position_embedding_type: ``absolute`` (learned), ``rotary`` or ``alibi``; None keeps the model's.
        attention_head_type: ``multihead`` (each query head has a key and value of its own) or ``multiquery`` (all share
            one); None keeps the model's.

    Raises:
        ConfigError: If a name is unknown, the model is no GPT, or its heads cannot be rotated.
    """
    if position_embedding_type is None and attention_head_type is None:
        return model
    if model.architecture != "gpt":
        raise ConfigError(
            f"position_embedding_type and attention_head_type are for GPTs, and {model.family} is a "
            f"{model.architecture.upper()}; leave them out"
        )
    if position_embedding_type is not None:
        if position_embedding_type not in _POSITIONS:
            raise ConfigError(
                f"position_embedding_type={position_embedding_type!r} is unknown; choose from {', '.join(_POSITIONS)}"
            )
        positions = _POSITIONS[position_embedding_type]
        # The scaling of rotary frequencies is nobody else's.
        scaling = model.rope_scaling if positions == "rope" else None
        model = replace(model, position_embedding_type=positions, rope_scaling=scaling)
    if attention_head_type is not None:
        groups = {"multihead": model.num_attention_heads, "multiquery": 1}
        if attention_head_type not in groups:
            raise ConfigError(
                f"attention_head_type={attention_head_type!r} is unknown; choose from {', '.join(groups)}"
            )
        model = replace(model, num_query_groups=groups[attention_head_type])
    return model


def variant_of(model: ModelConfig, stored: Mapping[str, Any]) -> ModelConfig:
    """``model`` as the variant that a checkpoint says it holds.

    Args:
        model: As its Hugging Face config describes it.
        stored: A saved ``ModelConfig.to_dict()``, or Megatron-LM's arguments, which use the same names.
    """
    if model.architecture != "gpt":
        return model
    positions = next((ours for ours, name in _POSITIONS.items() if name == stored.get("position_embedding_type")), None)
    heads = {1: "multiquery", model.num_attention_heads: "multihead"}.get(stored.get("num_query_groups", 0))
    return with_variant(model, positions, heads)
