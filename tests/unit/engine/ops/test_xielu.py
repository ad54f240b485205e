"""xIELU beside transformers, and compiled on a GPU beside the CPU."""

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation

from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.xielu import _xielu

_ALPHAS = (0.3, -1.4)
_BETA = 0.6
_EPS = -0.05


def _results(x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output of ours, and gradients of the input and of both parameters, fp32 on the CPU."""
    x = x.detach().requires_grad_()
    alphas = torch.tensor(_ALPHAS, device=x.device, requires_grad=True)
    beta = torch.tensor(
        [_BETA],
        dtype=x.dtype,
        device=x.device,
    )
    eps = torch.tensor(
        [_EPS],
        dtype=x.dtype,
        device=x.device,
    )
    output = compiled_for(x, _xielu)(x, alphas, beta, eps)
    output.backward(upstream)
    assert x.grad is not None
    assert alphas.grad is not None
    assert output.dtype is x.dtype
    return [part.detach().float().cpu() for part in (output, x.grad, alphas.grad)]


def _inputs() -> tuple[Tensor, Tensor]:
    """Values on both sides of zero and of eps, and a gradient of the output: [7, 3, 40] each."""
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(7, 3, 40, generator=generator)
    x[0] *= 0.02
    return x, torch.randn(7, 3, 40, generator=generator)


def test_xielu_equals_transformers() -> None:
    x, upstream = _inputs()
    ours = _results(x, upstream)
    module = XIELUActivation(beta=_BETA, eps=_EPS, dtype=torch.float32)
    with torch.no_grad():
        module.alpha_p.fill_(_ALPHAS[0])
        module.alpha_n.fill_(_ALPHAS[1])
    x.requires_grad_()
    expected = module(x)
    expected.backward(upstream)
    assert x.grad is not None
    assert module.alpha_p.grad is not None
    assert module.alpha_n.grad is not None
    of_alphas = torch.cat((module.alpha_p.grad, module.alpha_n.grad))
    for actual, theirs in zip(ours, (expected.detach(), x.grad, of_alphas), strict=True):
        torch.testing.assert_close(actual, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_xielu_equals_that_of_the_cpu(dtype: torch.dtype) -> None:
    x, upstream = (tensor.to(dtype) for tensor in _inputs())
    expected = _results(x, upstream)
    actual = _results(x.cuda(), upstream.cuda())
    rounding = 1e-4 if dtype is torch.float32 else 1e-2
    for ours, of_cpu in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, of_cpu, rtol=rounding, atol=rounding)
