"""LayerNorm and RMSNorm beside their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from lightning_megatron.engine.fillers.norm import Norm

HIDDEN = 16


def _config(**fields: Any) -> TransformerConfig:
    defaults = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "use_cpu_initialization": True}
    return TransformerConfig(**{**defaults, **fields})


def _formula(x: torch.Tensor, norm: Norm, kind: str, shift: float) -> torch.Tensor:
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    out = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight + shift)
    return out if norm.bias is None else out + norm.bias


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_outputs_and_gradients_are_those_of_the_formula(kind: str, zero_centered: bool) -> None:
    norm = Norm(_config(normalization=kind, layernorm_zero_centered_gamma=zero_centered), HIDDEN, eps=1e-3)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(HIDDEN))
    x = (3 * torch.randn(5, 2, HIDDEN) + 1).requires_grad_()
    inputs = [x, *norm.parameters()]
    got, expected = norm(x), _formula(x, norm, kind, 1.0 if zero_centered else 0.0)
    weight = torch.randn_like(got)
    # float32 sums of sixteen terms in another order.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((got * weight).sum(), inputs)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4)


def test_the_engines_norm_still_refuses_sequence_parallelism() -> None:
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(_config(sequence_parallel=True, tensor_model_parallel_size=2), HIDDEN)
