"""The number formats of weights and activations behind each of Lightning's precision names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_megatron.errors import ConfigError

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Formats of one run. Master weights, main gradients and optimizer moments are fp32 in every policy."""

    params: torch.dtype
    """Weights and activations."""
    dynamic_loss_scale: bool = False
    """Whether the loss is scaled up so that fp16 gradients do not underflow."""

    @property
    def is_16bit(self) -> bool:
        """Whether a master copy of the weights is needed."""
        return self.params is not torch.float32


_POLICIES: dict[str, DtypePolicy] = {
    "32-true": DtypePolicy(params=torch.float32),
    "bf16-mixed": DtypePolicy(params=torch.bfloat16),
    # Megatron's bf16 is one mode: bf16 weights in the layers, fp32 masters in the optimizer. Lightning's two names
    # differ only where autocast exists.
    "bf16-true": DtypePolicy(params=torch.bfloat16),
    "16-mixed": DtypePolicy(params=torch.float16, dynamic_loss_scale=True),
}


def dtype_policy(precision: str) -> DtypePolicy:
    """The formats behind a Lightning precision name.

    Raises:
        ConfigError: If the engine has no such mode.
    """
    if precision not in _POLICIES:
        raise ConfigError(
            f"precision={precision!r} is not a mode of the Megatron engine; choose from "
            f"{', '.join(get_args(PrecisionName))}"
        )
    return _POLICIES[precision]
