"""Each distance finds the row of the table that Hugging Face's T5 finds; on a GPU its gradient is right."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.models.t5 import relative_buckets


@pytest.mark.gpu(1)
@pytest.mark.parametrize("length", [128, 75])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_kernel_that_adds_a_bias_gives_it_the_right_gradient(length: int, bidirectional: bool) -> None:
    # As RelativeBias makes it: rows of a multiple of 16 numbers, cut to the length, one tensor for two layers.
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    generator = torch.Generator(device="cuda").manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    padded = -(-length // 16) * 16
    rows = relative_buckets(padded, bidirectional=bidirectional, num_buckets=32, max_distance=128)[:length].cuda()
    hidden = torch.zeros(2, 1, length, padded, dtype=torch.bool, device="cuda")
    hidden[1, ..., length - 20 :] = True
    if not bidirectional:
        hidden |= torch.ones(length, padded, dtype=torch.bool, device="cuda").triu(1)
    q, k, v, out_gradient = (random(2, 4, length, 64) for _ in range(4))
    table = random(32, 4)

    def gradient(dtype: torch.dtype, backend: SDPBackend) -> torch.Tensor:
        weight = table.to(dtype, copy=True).requires_grad_()
        bias = F.embedding(rows, weight).permute(2, 0, 1)[None].contiguous()
        bias = bias.masked_fill(hidden, -10000.0)[..., :length]
        with sdpa_kernel(backend):
            for scale in (1.0, 0.5):
                # Queries have a gradient, as in a model: without one torch keeps nothing for the backward pass.
                queries = (q.to(dtype) / 8).requires_grad_()
                first = F.scaled_dot_product_attention(queries, k.to(dtype), v.to(dtype), bias, scale=scale)
                first.backward(out_gradient.to(dtype), retain_graph=True)
        assert weight.grad is not None
        return weight.grad.double()

    exact = gradient(torch.float64, SDPBackend.MATH)
    # Products may be rounded to TF32's 11 bits, or bfloat16's 8; sums over thousands of pairs are more exact than one.
    for dtype, error in ((torch.float32, 2e-3), (torch.bfloat16, 3e-2)):
        actual = gradient(dtype, SDPBackend.EFFICIENT_ATTENTION)
        assert (actual - exact).norm() / exact.norm() < error, dtype
