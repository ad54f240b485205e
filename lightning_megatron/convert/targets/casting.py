"""Which dtype do written weights have, and does every number fit into it?"""

from __future__ import annotations

import torch

from lightning_megatron.errors import CheckpointError, ConfigError

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What ``--dtype`` may be."""


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that ``--dtype`` names; None keeps that of each tensor.

    Raises:
        ConfigError: If it names none.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype={name} is not a dtype of weights; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """``tensor`` as ``dtype``, rounded to the nearest; None leaves it.

    Raises:
        CheckpointError: If a finite number becomes infinite; ``name`` says whose it is.
    """
    if dtype is None or dtype is tensor.dtype:
        return tensor
    result = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        overflown = result.isinf() & ~tensor.isinf()
        if overflown.any():
            largest = tensor[overflown].abs().max().item()
            raise CheckpointError(
                f"{name} has numbers as large as {largest:.4g}, and {str(dtype).removeprefix('torch.')} ends at "
                f"{torch.finfo(dtype).max:.4g}; keep the dtype, or use bf16 or fp32"
            )
    return result
