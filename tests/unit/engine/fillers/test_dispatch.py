"""Experts without Megatron's layer: sorting by goals, and grouped products, beside loops over tokens in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron.engine.fillers.experts import Dispatcher, _products

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_rows_of_experts_are_gathered_again_where_norms_are() -> None:
    tokens, probs = torch.randn(5, 1, 8), torch.rand(5, 2)
    chosen, weights = torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [3, 0]]), torch.randn(4, 8, 8)
    kept, gradients = [], []
    for modules in (["layernorm"], ["core_attn"]):
        config: Any = SimpleNamespace(recompute_granularity="selective", recompute_modules=modules)
        alone: Any = SimpleNamespace(ep=None, expt_tp=None, tp_ep=None)
        dispatcher = Dispatcher(4, [0, 1, 2, 3], config, alone)
        inputs = [each.clone().requires_grad_() for each in (tokens, probs, weights)]
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(inputs[0], chosen, inputs[1]))
        rows, ends, factors = dispatcher.dispatch_postprocess(*sent)
        outputs = dispatcher.combine_preprocess(_products(rows, inputs[2], ends) * factors[:, None])
        outputs = dispatcher.combine_postprocess(dispatcher.token_combine(outputs))
        kept.append(rows.untyped_storage().nbytes())
        gradients.append(torch.autograd.grad(outputs.square().sum(), inputs))
    assert kept == [0, 10 * 8 * 4]
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_products_are_those_of_each_expert_in_fp32(device: str) -> None:
    """One expert has no token. In bf16 (on a GPU) a product and its gradients are rounded once."""
    on_gpu = device == "cuda"
    sizes, width, rows = ([300, 0, 17, 195], 256, 384) if on_gpu else ([5, 0, 1, 4], 8, 12)
    tokens = torch.randn(sum(sizes), width, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    weights = torch.nn.Parameter(torch.randn(len(sizes), rows, width, device=device).to(tokens.dtype))
    tokens.requires_grad_()
    upstream = torch.randn(sum(sizes), rows, device=device).to(tokens.dtype)
    expected_inputs = [each.detach().float().requires_grad_() for each in (tokens, weights)]
    parts = zip(expected_inputs[0].split(sizes), expected_inputs[1], strict=True)
    expected = torch.cat([part @ weight.t() for part, weight in parts])
    expected.backward(upstream.float())

    weights.main_grad = torch.ones_like(weights, dtype=torch.float32)  # type: ignore[attr-defined]
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    got = _products(tokens, weights, ends)
    got.backward(upstream)

    rounded = {"rtol": 2**-7, "atol": 0.2} if on_gpu else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.float(), expected, **rounded)
    torch.testing.assert_close(tokens.grad.float(), expected_inputs[0].grad, **rounded)  # type: ignore[union-attr]
    torch.testing.assert_close(weights.main_grad - 1.0, expected_inputs[1].grad, **rounded)  # type: ignore[operator]
    assert weights.grad_added_to_main_grad  # type: ignore[attr-defined]
    again = _products(tokens, weights, ends)
    assert torch.equal(again, got)
