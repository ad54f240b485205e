"""Names of the weights that LoRA trains in Megatron checkpoints, which distinguish them from frozen weights."""

from __future__ import annotations

import re

ADAPTER_SUFFIX = "_lora"
"""Appended to the name of a linear layer: the name of its adapter."""
_IN_FILES: dict[tuple[int, int], tuple[int, ...]] = {
    (4, 3): (0, 0, 1, 2),
    (6, 2): (0, 0, 0, 0, 1, 1),
    (6, 4): (0, 0, 0, 1, 2, 3),
}
"""For linears that fuse more matrices than Hugging Face's files have modules, by both numbers: the module of each.
Queries and gates are one module (Qwen3-Next), and the six matrices of linear attention are two or four."""
_HEAD = re.compile(r"(^|\.)(classification_head|token_head)\.")


def module_of_matrices(num_matrices: int, num_modules: int) -> tuple[int, ...]:
    """For each matrix that a linear fuses, the number of the module of Hugging Face's that has it, and its adapter."""
    return _IN_FILES.get((num_matrices, num_modules), tuple(range(num_matrices)))


def is_adapter(name: str) -> bool:
    """Whether ``name`` is that of an adapter weight, matrix A or B."""
    return name.endswith((f"{ADAPTER_SUFFIX}.A", f"{ADAPTER_SUFFIX}.B"))


def is_trained_with_lora(name: str) -> bool:
    """Whether a model with adapters trains the weight ``name``: of an adapter, or of a classification head, in full.

    ``peft`` does so for its tasks of classification, and saves such a head with the adapters (``modules_to_save``).
    """
    return is_adapter(name) or _HEAD.search(name) is not None
