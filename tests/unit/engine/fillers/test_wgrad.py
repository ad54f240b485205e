"""Do weight gradients arrive in the main gradient, added to what is there?"""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from lightning_megatron.engine.fillers.kernels import accumulate_weight_gradient
from lightning_megatron.engine.patches import WEIGHT_GRADIENTS, active

FLOAT, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _check(device: str, activation: torch.dtype, main: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy, before = (torch.randn(*s, generator=generator) for s in ((40, 16), (40, 24), (24, 16)))
    x, dy, before = x.to(activation), dy.to(activation), before.to(main)
    main_grad = before.clone().to(device)
    accumulate_weight_gradient(x.to(device), dy.to(device), main_grad)
    expected = before.double() + torch.einsum("ko,ki->oi", dy.double(), x.double())
    # The product is summed in float32; only a half-precision main gradient rounds it.
    tolerance = 1e-5 if main == FLOAT else 4 * torch.finfo(main).eps
    torch.testing.assert_close(main_grad.cpu().double(), expected, rtol=tolerance, atol=10 * tolerance)


PAIRS = [(FLOAT, FLOAT), (BF16, FLOAT), (FP16, FLOAT), (BF16, BF16)]


@pytest.mark.parametrize(("activation", "main"), PAIRS)
def test_the_product_is_added_on_the_cpu(activation: torch.dtype, main: torch.dtype) -> None:
    _check("cpu", activation, main)


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "main"), PAIRS)
def test_the_product_is_added_on_cuda(
    activation: torch.dtype, main: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    _check("cuda", activation, main)


def _config(fusion: bool) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, gradient_accumulation_fusion=fusion)


@pytest.mark.usefixtures("one_rank")
def test_a_linear_of_the_engine_accumulates_two_backwards_of_which_autograd_sees_none() -> None:
    torch.manual_seed(0)
    with active(WEIGHT_GRADIENTS):
        linear = ColumnParallelLinear(8, 12, config=_config(True), init_method=torch.nn.init.normal_, bias=False)
        linear.weight.main_grad = torch.zeros(12, 8)
        x, weight = torch.randn(5, 2, 8), torch.randn(5, 2, 12)
        for _ in range(2):
            (linear(x)[0] * weight).sum().backward()
    expected = 2 * torch.einsum("sbo,sbi->oi", weight, x)
    torch.testing.assert_close(linear.weight.main_grad, expected, rtol=1e-5, atol=1e-5)
    assert linear.weight.grad is None


@pytest.mark.usefixtures("one_rank")
def test_the_engine_still_refuses_without_apex() -> None:
    if layers._grad_accum_fusion_available:
        pytest.skip("Apex's extension is installed")
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        ColumnParallelLinear(8, 12, config=_config(True), init_method=torch.nn.init.normal_)
