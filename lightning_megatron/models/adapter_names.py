"""Names of LoRA adapter weights in Megatron checkpoints, which distinguish them from frozen weights."""

from __future__ import annotations

ADAPTER_SUFFIX = "_lora"
"""Appended to the name of a linear layer: the name of its adapter."""


def is_adapter(name: str) -> bool:
    """Whether ``name`` is that of an adapter weight, matrix A or B."""
    return name.endswith((f"{ADAPTER_SUFFIX}.A", f"{ADAPTER_SUFFIX}.B"))
