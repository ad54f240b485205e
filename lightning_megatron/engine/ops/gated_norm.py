"""RMSNorm of each head's output, multiplied by the SiLU of a gate, as in Mamba 2 and gated delta nets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for


class GatedNorm(torch.nn.Module):
    """Norm whose weight, [d], all heads share; unlike those of layers it is never zero-centred.

    Each tp rank has some of the heads: the weight's gradients are summed over tp in the backward pass.
    """

    def __init__(self, width: int, config: TransformerConfig) -> None:
        """Create weights of 1, on the same device as other layers.

        Args:
            width: Dimensions d of a head.
            config: Gives epsilon, dtype and device.
        """
        super().__init__()
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(width, dtype=config.params_dtype, device=device)
        )
        self.eps: float = config.layernorm_epsilon
        self._is_split = config.tensor_model_parallel_size > 1

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize and multiply, [..., d]. The backward pass is collective over the tp group.

        Args:
            x: [..., d].
            gate: As ``x``.
        """
        weight: Tensor = self.weight
        if self._is_split:
            weight = copy_to_tensor_model_parallel_region(weight)
        output: Tensor = compiled_for(x, _normalize)(x, gate, weight, self.eps)
        return output

    def extra_repr(self) -> str:
        """Size and epsilon, for print(model)."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _normalize(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # Rounded as in transformers.
    normalized = (wide * inverse).to(x.dtype) * weight
    return (normalized * F.silu(gate.float())).to(x.dtype)
