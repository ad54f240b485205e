"""Fused optimizers beside torch's own, clipping and leaving steps out among it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_megatron.engine.fillers.adam import FusedAdam, FusedSGD

Parameters = list[torch.Tensor]

PAIRS: dict[str, tuple[Callable[[Parameters], Any], Callable[[Parameters], Any]]] = {
    "adamw": (
        lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, foreach=False),
    ),
    "adam": (
        lambda p: FusedAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, foreach=False),
    ),
    "sgd": (
        lambda p: FusedSGD(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, foreach=False),
    ),
    "momentum": (
        lambda p: FusedSGD(p, lr=1e-2, weight_decay=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.9, foreach=False),
    ),
}


def _parameters(device: str) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*s, generator=generator).to(device).requires_grad_() for s in ((7, 5), (3,), (600,))]


def _set_gradients(parameters: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("name", PAIRS)
def test_updates_are_those_of_torch_and_left_out_where_it_is_told(name: str, scale: float | None, device: str) -> None:
    ours, reference = _parameters(device), _parameters(device)
    fused, plain = PAIRS[name][0](ours), PAIRS[name][1](reference)
    for step in range(4):
        _set_gradients(ours, step)
        _set_gradients(reference, step)
        for parameter in reference:
            assert parameter.grad is not None
            parameter.grad /= scale or 1.0
        fused.grad_scale = None if scale is None else torch.tensor(scale, device=device)
        fused.found_inf = None if scale is None else torch.zeros(1, device=device)
        fused.step()
        plain.step()
        before = [parameter.detach().clone() for parameter in ours]
        fused.found_inf = torch.ones(1, device=device)
        fused.step()
        fused.uncount_step()
        assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
    for a, b in zip(ours, reference, strict=True):
        # Four float32 updates in another order of operations.
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_an_update_does_not_wait_for_the_gpu(name: str) -> None:
    parameters = _parameters("cuda")
    optimizer = PAIRS[name][0](parameters)
    _set_gradients(parameters, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
