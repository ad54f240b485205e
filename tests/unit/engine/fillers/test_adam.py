"""Fused optimizers beside torch's own, clipping and leaving steps out among it, and what upstream still lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import optimizer as factory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from lightning_megatron.engine.fillers.adam import FusedAdam, FusedSGD
from lightning_megatron.engine.patches import MEGATRON, active

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
@pytest.mark.parametrize("name", PAIRS)
def test_updates_are_those_of_torch(name: str, device: str) -> None:
    ours, reference = _parameters(device), _parameters(device)
    fused, plain = PAIRS[name][0](ours), PAIRS[name][1](reference)
    for step in range(6):
        _set_gradients(ours, step)
        _set_gradients(reference, step)
        fused.step()
        plain.step()
    for a, b in zip(ours, reference, strict=True):
        # Six float32 updates in another order of operations.
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_divided_and_a_step_is_left_out_where_it_is_told(name: str, device: str) -> None:
    ours, reference = _parameters(device), _parameters(device)
    fused, plain = PAIRS[name][0](ours), PAIRS[name][1](reference)
    for step in range(3):
        _set_gradients(ours, step)
        _set_gradients(reference, step)
        for parameter in reference:
            assert parameter.grad is not None
            parameter.grad /= 2.5
        fused.grad_scale = torch.tensor(2.5, device=device)
        fused.found_inf = torch.zeros(1, device=device)
        fused.step()
        plain.step()
        before = [parameter.detach().clone() for parameter in ours]
        fused.found_inf = torch.ones(1, device=device)
        fused.step()
        fused.uncount_step()
        assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
    for a, b in zip(ours, reference, strict=True):
        # Three float32 updates in another order of operations.
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


# --- in the engine ---


class _Model(MegatronModule):
    """Two linears, one with a bias, as a Megatron model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.wide = ColumnParallelLinear(6, 10, config=config, init_method=torch.nn.init.normal_)
        self.narrow = ColumnParallelLinear(10, 3, config=config, init_method=torch.nn.init.normal_, bias=False)


def _engine_of(name: str, distributed: bool) -> tuple[torch.nn.Module, Any]:
    """A small model in Megatron's DDP, and Megatron's optimizer of it."""
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    model = _Model(config)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, ddp_config, model)
    options = OptimizerConfig(
        optimizer=name,
        lr=1e-1,
        use_distributed_optimizer=distributed,
    )
    return ddp, get_megatron_optimizer(options, [ddp])


# --- what upstream still gets wrong ---


@pytest.mark.usefixtures("one_rank")
def test_upstream_still_refuses_to_shard_sgd() -> None:
    with pytest.raises(AssertionError, match="Only Adam"):
        _engine_of("sgd", True)


def test_upstream_still_builds_an_unfused_adam() -> None:
    if factory.USING_PYTORCH_OPTIMIZER:
        assert factory.Adam is torch.optim.AdamW


@pytest.mark.usefixtures("one_rank")
def test_upstream_still_shards_float32_weights_into_graph_nodes() -> None:
    _, upstream = _engine_of("adam", True)
    with active(MEGATRON):
        _, ours = _engine_of("adam", True)
    assert [p.is_leaf for g in upstream.param_groups for p in g["params"]] == [False] * 3
    assert [p.is_leaf for g in ours.param_groups for p in g["params"]] == [True] * 3
    assert all(p.tensor_model_parallel for g in ours.param_groups for p in g["params"])
