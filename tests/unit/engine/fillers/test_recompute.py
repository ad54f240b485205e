"""What is made again in the backward pass is not kept for it, and the gradients are those of keeping it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP

from lightning_megatron.engine.fillers.kernels import recomputes_activation


class _Linear(torch.nn.Linear):
    def forward(self, input_: torch.Tensor) -> Any:
        self.read = input_
        return super().forward(input_), None


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_does_not_keep_its_activation(gated: bool) -> None:
    mlp: Any = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(
        recompute_modules=["layernorm"],
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=gated,
        activation_func=F.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    )
    mlp.activation_func = F.silu
    mlp.linear_fc1, mlp.linear_fc2 = _Linear(4, 16 if gated else 8), _Linear(8, 4)
    hidden = torch.randn(3, 4)
    gradients = []
    for mlp.config.recompute_granularity in (None, "selective"):
        output, _ = recomputes_activation(MLP.forward)(mlp, hidden)
        is_empty = mlp.linear_fc2.read.untyped_storage().nbytes() == 0
        assert is_empty == (mlp.config.recompute_granularity == "selective")
        gradients.append(torch.autograd.grad(output.square().sum(), list(mlp.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
