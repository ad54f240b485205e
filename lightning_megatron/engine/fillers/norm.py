"""LayerNorm and RMSNorm for every norm slot of Megatron-Core, also with sequence parallelism.

Megatron-Core's ``WrappedTorchNorm`` (megatron-core 0.16.1, transformer/torch_norm.py) refuses sequence parallelism and
zero-centred weights, and creates float32 weights, which keep torch from its fused kernels for bfloat16 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.fillers.choice import has_triton
from lightning_megatron.errors import ConfigError

WIDEST_SUM = 16384
"""Columns that the kernel of ``Norm.add`` holds in registers."""


class Norm(torch.nn.Module):
    """The norm that ``config.normalization`` names, over the last axis.

    Parameters ``weight`` and, for LayerNorm, ``bias``: [hidden_size] in ``config.params_dtype``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        """Create the parameters where the other layers create theirs.

        Raises:
            ConfigError: If the config asks for a norm that this one does not compute.
        """
        super().__init__()
        _check(config)
        self.shape: tuple[int, ...] = (hidden_size,)
        self.eps = eps
        self.is_rms: bool = config.normalization == "RMSNorm"
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(self.shape, dtype=config.params_dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if not self.is_rms:
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
        same = x.dtype == residual.dtype == self.weight.dtype
        return same and x.is_cuda and self.shape[0] <= WIDEST_SUM and has_triton()

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
        """``residual + dropout(x + bias)``, [..., hidden_size]; the next ``forward`` has its norm already.

        Args:
            x: [..., hidden_size], on CUDA, in the parameters' dtype.
            bias: [hidden_size]; None for none.
            residual: As ``x``.
            probability: With which a number is dropped.
        """
        from lightning_megatron.engine.fillers.add_norm import add_norm  # needs Triton

        for hook in self._forward_pre_hooks.values():  # DDP's, that waits until the parameters are gathered
            hook(self, ())
        weight: Tensor = self.weight + 1.0 if self.zero_centered else self.weight
        self._ahead = add_norm(x, bias, residual, weight, self.bias, self.eps, probability)
        return self._ahead[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalized x: [..., hidden_size], in the parameters' dtype."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        weight: Tensor = self.weight + 1.0 if self.zero_centered else self.weight
        bias: Tensor | None = self.bias
        if x.dtype != weight.dtype:  # fp32_residual_connection: float32 in, activation dtype out
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        if self.is_rms:
            out = F.rms_norm(x, self.shape, weight, self.eps)
        else:
            out = F.layer_norm(x, self.shape, weight, bias, self.eps)
        return out.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """What differs between two norms, for print(model)."""
        return f"{'RMSNorm' if self.is_rms else 'LayerNorm'}, {self.shape[0]}, eps={self.eps}"


def _check(config: TransformerConfig) -> None:
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ConfigError(
            f"normalization={config.normalization!r} is not computed by this norm; use 'LayerNorm' or 'RMSNorm'"
        )
    for name in ("persist_layer_norm", "memory_efficient_layer_norm"):
        if getattr(config, name):
            raise ConfigError(f"{name}=True is a kernel of Apex, which this norm does not use; leave {name} out")
