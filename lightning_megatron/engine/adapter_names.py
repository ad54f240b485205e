"""How the weights of adapters (LoRA) are named in Megatron's checkpoints, by which they are told from frozen ones."""

from __future__ import annotations

ADAPTER_SUFFIX = "_lora"
"""What the name of a linear's adapters has behind that of the linear."""


def is_adapter(name: str) -> bool:
    """Whether a weight's name is that of a matrix of an adapter, A or B."""
    return name.endswith((f"{ADAPTER_SUFFIX}.A", f"{ADAPTER_SUFFIX}.B"))
