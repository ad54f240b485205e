"""Does liger-kernel's SwiGLU equal the formula inside the engine's MLP?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu

from lightning_megatron.engine.patches import SWIGLU, active


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel.megatron")
    x = torch.randn(5, 2, 32, device="cuda").to(dtype).requires_grad_()
    with active(SWIGLU):
        got = fused_bias_swiglu.bias_swiglu_impl(x, None)
    gate, up = x.float().chunk(2, -1)
    expected = F.silu(gate) * up
    weight = torch.randn_like(expected)
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    (gradient,) = torch.autograd.grad((got.float() * weight).sum(), x)
    (reference,) = torch.autograd.grad((expected * weight).sum(), x)
    torch.testing.assert_close(gradient.float(), reference.float(), rtol=2 * tolerance, atol=4 * tolerance)


def test_the_engine_still_computes_it_in_an_autograd_function_of_its_own() -> None:
    assert issubclass(fused_bias_swiglu.SwiGLUFunction, torch.autograd.Function)
    assert fused_bias_swiglu.SwiGLUFunction.__module__ == "megatron.core.fusions.fused_bias_swiglu"
