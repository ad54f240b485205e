"""Norms, and the bias, dropout and residual addition before them, which are fused with the norm on CUDA.

Megatron-Core's WrappedTorchNorm (megatron-core 0.16.1, transformer/torch_norm.py) refuses sequence parallelism and
zero-centred weights, and creates float32 weights, for which torch does not use its fused kernels on bfloat16 inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

MAX_FUSED_COLUMNS = 16384
"""Maximum number of columns, which the kernel of ``Norm.add`` holds in registers."""

MAX_HEAD_WIDTH = 256
"""Maximum number of columns of the kernel for queries and keys."""


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm, as named by ``config.normalization``, over the last dimension.

    Parameters ``weight`` and, for LayerNorm, ``bias``: [hidden_size] in ``config.params_dtype``. With
    ``config.layernorm_zero_centered_gamma``, 1 is added to the weight, in float32 as in Gemma.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        has_bias: bool = True,
    ) -> None:
        """Create the parameters, on the same device as other layers.

        Args:
            config: Selects the norm, its dtype and its device.
            hidden_size: Size of the last dimension.
            eps: Added to the variance.
            has_bias: Whether a LayerNorm has a bias; for ``ModuleSpec.params``.
        """
        super().__init__()
        self.shape: tuple[int, ...] = (hidden_size,)
        self.eps = eps
        self.is_rms: bool = config.normalization == "RMSNorm"
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        # Initially scales by 1 and shifts by 0.
        scale = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(torch.full(self.shape, scale, **options))
        self.bias: torch.nn.Parameter | None = None
        if has_bias and not self.is_rms:
            self.bias = torch.nn.Parameter(torch.zeros(self.shape, **options))
        for parameter in self.parameters():
            # distributed/finalize_model_grads.py sums these gradients over TP: each rank has a shard of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._precomputed: tuple[Tensor, Tensor] | None = None
        """Sum computed by ``add``, and its norm."""

    def can_add(self, x: Tensor, residual: Tensor) -> bool:
        """Whether ``add`` supports these tensors; for training, which is not bound by kernel launches from Python."""
        is_plain = x.dtype == residual.dtype == self.weight.dtype and (
            self.is_rms or self.bias is not None
        )
        return is_plain and x.is_cuda and self.shape[0] <= MAX_FUSED_COLUMNS

    def add(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        probability: float,
    ) -> Tensor:
        """Compute ``residual + dropout(x + bias)``, [..., hidden_size], and its norm for the next ``forward``.

        Args:
            x: [..., hidden_size], on CUDA, in the parameters' dtype.
            bias: [hidden_size]; None for none.
            residual: As ``x``.
            probability: Probability of dropping an element.
        """
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.norms import add_norm

        # DDP's hooks, which wait for the all-gather of parameters.
        for hook in self._forward_pre_hooks.values():
            hook(self, ())
        self._precomputed = add_norm(
            x,
            bias,
            residual,
            self._gain(),
            self.bias,
            self.eps,
            probability,
        )
        return self._precomputed[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x: [..., hidden_size], in the parameters' dtype."""
        precomputed = self._precomputed
        self._precomputed = None
        if precomputed is not None and precomputed[0] is x:
            return precomputed[1]
        if self._is_of_heads(x):
            # Imported here: Triton is on GPUs only.
            from lightning_megatron.engine.ops.triton.head_norm import head_norm

            return head_norm(x, self._gain(), self.eps)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.dtype != weight.dtype:  # fp32_residual_connection: float32 in, activation dtype out
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        scale = None if self.zero_centered else weight
        if self.is_rms:
            out = F.rms_norm(x, self.shape, scale, self.eps)
        else:
            out = F.layer_norm(
                x,
                self.shape,
                scale,
                None if self.zero_centered else bias,
                self.eps,
            )
        if self.zero_centered:
            shifted = out if bias is None else out + bias
            out = torch.addcmul(shifted, out, weight)
        return out.to(self.weight.dtype)

    def _gain(self) -> Tensor:
        """Factor of the normalized values, [hidden_size]."""
        if self.zero_centered:
            return self.weight.float() + 1.0
        return self.weight

    def _is_of_heads(self, x: Tensor) -> bool:
        """Whether ``x`` are heads, [s, b, n, hn], that the kernel for narrow rows normalizes."""
        is_narrow = self.is_rms and self.shape[0] <= MAX_HEAD_WIDTH
        return is_narrow and x.is_cuda and x.dim() == 4 and x.dtype == self.weight.dtype

    def extra_repr(self) -> str:
        """Kind, size and epsilon, for print(model)."""
        kind = "RMSNorm" if self.is_rms else "LayerNorm"
        return f"{kind}, {self.shape[0]}, eps={self.eps}"


class NormOfAllHeads(Norm):
    """RMSNorm over the queries or keys of all heads, across tensor-parallel ranks (OLMo 2).

    Every rank has the full weight, [num_heads * hn], and uses the slice of its heads; Megatron sums the gradients over
    TP, as for all norms of queries and keys. If there are more ranks than heads, neighbouring ranks hold the same head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        num_heads: int,
    ) -> None:
        """Create an RMSNorm over ``num_heads`` (of all ranks; for ``ModuleSpec.params``) x ``hidden_size`` columns."""
        super().__init__(config, num_heads * hidden_size, eps)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads, [s, b, n/tp, hn]; all-reduces [s, b] over TP in forward and backward pass."""
        heads = x.shape[2]
        tp = parallel_state.get_tensor_model_parallel_world_size()
        replicas = heads * tp // self.num_heads
        first = parallel_state.get_tensor_model_parallel_rank() // replicas * heads
        squares = x.float().pow(2).sum((2, 3), keepdim=True) / replicas
        if tp > 1:
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares)
            )
        inverse = torch.rsqrt(squares / self.shape[0] + self.eps)
        normalized = (x.float() * inverse).to(x.dtype)
        weights = self.weight.view(self.num_heads, -1)
        return normalized * weights[first : first + heads]


class BiasDropoutAdd:
    """Megatron's bias, dropout and residual addition; on CUDA fused with the norm that follows."""

    def __init__(
        self,
        probability: float | None = None,
        multiplier: float = 1.0,
        config: Any = None,
    ) -> None:
        """Set what differs from Megatron's, which passes ``config`` in one of its specs.

        Args:
            probability: Replaces the layer's dropout probability; None keeps it.
            multiplier: Factor of what is added to the residual, its bias included.
            config: Unused.
        """
        del config
        self.probability = probability
        self.multiplier = multiplier
        self.norm: Norm | None = None
        """Norm that reads the sum before anything else does; None if unknown."""

    def __call__(
        self,
        training: bool,
        fused: bool,
    ) -> Callable[..., Tensor]:
        """Function that Megatron's layer calls with (x, bias), the residual and its config's dropout probability."""
        plain = get_bias_dropout_add(training, fused)

        def add(
            x_with_bias: tuple[Tensor, Tensor | None],
            residual: Tensor,
            probability: float,
        ) -> Tensor:
            if self.probability is not None:
                probability = self.probability
            x, bias = x_with_bias
            if self.multiplier != 1.0:
                x = x * self.multiplier
                if bias is not None:
                    bias = bias * self.multiplier
            if training and self.norm is not None and self.norm.can_add(x, residual):
                return self.norm.add(x, bias, residual, probability)
            total: Tensor = plain((x, bias), residual, probability)
            return total

        return add
