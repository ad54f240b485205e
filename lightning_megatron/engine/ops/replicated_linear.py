"""Linear layer with the same weight on each tensor-parallel rank, applied to the tokens that the rank has."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """Linear without communication: under sequence parallelism of [s/tp, b, in], otherwise of [s, b, in].

    megatron-core 0.16.1, transformer/multi_latent_attention.py, has a column-parallel linear in its place, which
    gathers hidden states before and latents after it, if there is no Transformer Engine.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
    ) -> None:
        """Create uninitialized parameters, on the same device as other layers."""
        super().__init__()
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.config = config
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **options))
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(output_size, **options))
        for parameter in self.parameters():
            # Megatron sums its gradients over the tp group, whose ranks have seen a shard of the sequence each.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the product, [..., out], and no bias to add, as Megatron's linears do."""
        # Not imported by name: both are patched (engine/patches.py).
        multiply = layers.linear_with_frozen_weight
        if self.weight.requires_grad:
            multiply = layers.linear_with_grad_accumulation_and_async_allreduce
        product: Tensor = multiply(
            x,
            self.weight,
            self.bias,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )
        return product, None

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        rows, columns = self.weight.shape
        return f"in={columns}, out={rows}, bias={self.bias is not None}"
