"""Kernels in place of Transformer Engine's and Apex's beside their formulas, and what upstream still does without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from lightning_megatron.engine.fillers.kernels import _LookUp, embedding
from lightning_megatron.engine.patches import SWIGLU, WEIGHT_GRADIENTS, stand_ins
from lightning_megatron.engine.runtime import replaced

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.gpu
@pytest.mark.usefixtures("one_rank")
def test_a_bias_that_the_product_adds_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, gradient_accumulation_fusion=True)
    with replaced(stand_ins(WEIGHT_GRADIENTS)):
        linear = ColumnParallelLinear(8, 12, config=config, init_method=torch.nn.init.normal_, bias=True).cuda()
        torch.nn.init.normal_(linear.bias)
        linear.weight.main_grad = torch.zeros(12, 8, device="cuda")
        x, upstream = torch.randn(5, 2, 8, device="cuda", requires_grad=True), torch.randn(5, 2, 12, device="cuda")
        got, _ = linear(x)
        gradients = torch.autograd.grad(got, (x, linear.bias), upstream)
    torch.testing.assert_close(got, F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-5)
    expected = upstream @ linear.weight, upstream.sum((0, 1))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    weight_gradient = torch.einsum("sbo,sbi->oi", upstream, x)
    torch.testing.assert_close(linear.weight.main_grad, weight_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [True, False])
def test_an_embeddings_gradient_is_added_and_autograd_keeps_none(device: str, tied: bool) -> None:
    torch.manual_seed(0)
    weight: Any = torch.nn.Parameter(torch.randn(10, 4, device=device))
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.ones_like(weight), False, tied
    ids, upstream = torch.tensor([[1, 2, 2], [3, 1, 2]], device=device), torch.randn(2, 3, 4, device=device)
    rows = _LookUp.apply(ids, weight) if device == "cpu" else embedding(ids, weight)
    (rows * upstream).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    (F.embedding(ids, plain) * upstream).sum().backward()
    torch.testing.assert_close(weight.main_grad - 1, plain.grad, rtol=1e-5, atol=1e-6)
    assert weight.grad_added_to_main_grad is not tied
    assert (weight.grad is None) is tied  # what is not None is looked at by nobody


# ---- RoPE and SwiGLU -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_formula(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel.megatron")
    x = torch.randn(5, 2, 32, device="cuda").to(dtype).requires_grad_()
    with replaced(stand_ins(SWIGLU)):
        got = fused_bias_swiglu.bias_swiglu_impl(x, None)
    gate, up = x.float().chunk(2, -1)
    expected, tolerance = F.silu(gate) * up, max(1e-5, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected)
    gradient, reference = (torch.autograd.grad(each, x, upstream.to(each.dtype))[0] for each in (got, expected))
    torch.testing.assert_close(gradient.float(), reference.float(), rtol=2 * tolerance, atol=4 * tolerance)
