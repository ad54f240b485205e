"""LayerNorm and RMSNorm for every norm slot of Megatron-Core, also with sequence parallelism, and over all heads.

Megatron-Core's ``WrappedTorchNorm`` (megatron-core 0.16.1, transformer/torch_norm.py) refuses sequence parallelism and
zero-centred weights, and creates float32 weights, which keep torch from its fused kernels for bfloat16 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

WIDEST_SUM = 16384
"""Columns that the kernel of ``Norm.add`` holds in registers."""


class Norm(torch.nn.Module):
    """The norm that ``config.normalization`` names, over the last axis.

    Parameters ``weight`` and, for LayerNorm, ``bias``: [hidden_size] in ``config.params_dtype``. Where
    ``config.layernorm_zero_centered_gamma`` says so, 1 is added to the weight, in float32 as in Gemma.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, has_bias: bool = True
    ) -> None:
        """Create the parameters where the other layers create theirs.

        Args:
            config: Names the norm.
            hidden_size: Columns.
            eps: Added to the variance.
            has_bias: Whether a LayerNorm has one; for ``ModuleSpec.params``.
        """
        super().__init__()
        self.shape: tuple[int, ...] = (hidden_size,)
        self.eps = eps
        self.is_rms: bool = config.normalization == "RMSNorm"
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if not self.is_rms and has_bias:
            self.bias = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            # distributed/finalize_model_grads.py sums these gradients over TP: each rank saw a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._ahead: tuple[Tensor, Tensor] | None = None
        """A sum that ``add`` made, and its norm."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as a norm that neither scales nor shifts."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def can_add(self, x: Tensor, residual: Tensor) -> bool:
        """Whether ``add`` takes these; it is for training, whose time a kernel launch from Python does not decide."""
        same = x.dtype == residual.dtype == self.weight.dtype and (self.is_rms or self.bias is not None)
        return same and x.is_cuda and self.shape[0] <= WIDEST_SUM

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
        """``residual + dropout(x + bias)``, [..., hidden_size]; the next ``forward`` has its norm already.

        Args:
            x: [..., hidden_size], on CUDA, in the parameters' dtype.
            bias: [hidden_size]; None for none.
            residual: As ``x``.
            probability: With which a number is dropped.
        """
        from lightning_megatron.engine.fillers.triton_kernels import add_norm  # Triton is on GPUs only

        for hook in self._forward_pre_hooks.values():  # DDP's, that waits until the parameters are gathered
            hook(self, ())
        weight: Tensor = self.weight.float() + 1.0 if self.zero_centered else self.weight
        self._ahead = add_norm(x, bias, residual, weight, self.bias, self.eps, probability)
        return self._ahead[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalized x: [..., hidden_size], in the parameters' dtype."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.dtype != weight.dtype:  # fp32_residual_connection: float32 in, activation dtype out
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        given = None if self.zero_centered else weight
        if self.is_rms:
            out = F.rms_norm(x, self.shape, given, self.eps)
        else:
            out = F.layer_norm(x, self.shape, given, None if self.zero_centered else bias, self.eps)
        if self.zero_centered:
            out = torch.addcmul(out if bias is None else out + bias, out, weight)
        return out.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """What differs between two norms, for print(model)."""
        return f"{'RMSNorm' if self.is_rms else 'LayerNorm'}, {self.shape[0]}, eps={self.eps}"


class NormOfAllHeads(Norm):
    """RMSNorm over all heads of the queries or keys, those of other tensor-parallel ranks included (OLMo 2).

    Every rank has the whole weight, [num_heads * hn], and uses its heads' part; Megatron sums the gradients over TP, as
    those of each norm of queries and keys. Of more ranks than heads, neighbours hold the same head.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int) -> None:
        """Take what ``Norm`` takes, of an RMSNorm, and for ``ModuleSpec.params`` how many heads all ranks have."""
        super().__init__(config, num_heads * hidden_size, eps)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Normalized heads of this rank, [s, b, n/tp, hn]; the TP ranks sum squares, [s, b], in either direction."""
        heads, tp = x.shape[2], parallel_state.get_tensor_model_parallel_world_size()
        copies = heads * tp // self.num_heads
        first = parallel_state.get_tensor_model_parallel_rank() // copies * heads
        squares = x.float().pow(2).sum((2, 3), keepdim=True) / copies
        if tp > 1:
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normalized = (x.float() * torch.rsqrt(squares / self.shape[0] + self.eps)).to(x.dtype)
        return normalized * self.weight.view(self.num_heads, -1)[first : first + heads]
