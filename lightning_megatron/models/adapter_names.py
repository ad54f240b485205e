"""Names of the weights that LoRA trains in Megatron checkpoints, which distinguish them from frozen weights."""

from __future__ import annotations

import re

ADAPTER_SUFFIX = "_lora"
"""Appended to the name of a linear layer: the name of its adapter."""
_HEAD = re.compile(r"(^|\.)(classification_head|token_head)\.")


def is_adapter(name: str) -> bool:
    """Whether ``name`` is that of an adapter weight, matrix A or B."""
    return name.endswith((f"{ADAPTER_SUFFIX}.A", f"{ADAPTER_SUFFIX}.B"))


def is_trained_with_lora(name: str) -> bool:
    """Whether a model with adapters trains the weight ``name``: of an adapter, or of a classification head, in full.

    ``peft`` does so for its tasks of classification, and saves such a head with the adapters (``modules_to_save``).
    """
    return is_adapter(name) or _HEAD.search(name) is not None
