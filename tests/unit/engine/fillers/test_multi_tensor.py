"""Are norm, scale and copy of many tensors right, and without a wait per tensor?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.engine.fillers.kernels import copy, l2_norm, scale
from lightning_megatron.engine.patches import MEGATRON, MULTI_TENSOR, active
from lightning_megatron.engine.runtime import emulated_cuda

FLAG = torch.zeros(1, dtype=torch.int)


class _Operations(TorchDispatchMode):
    """Counts the operations that reach the device; ``_local_scalar_dense`` is a wait of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return self.count["aten::_local_scalar_dense"]


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, generator=generator) for s in ((3, 4), (100,), (1,), (7, 2))]


def test_the_norm_is_that_of_one_long_vector_and_waits_for_nothing() -> None:
    tensors = _tensors()
    with _Operations() as operations:
        norm, per_tensor = l2_norm(65536, FLAG, [tensors], False)
    assert operations.waits == 0
    assert per_tensor is None
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat([t.flatten() for t in tensors]).norm())


def test_the_engines_norm_still_waits_and_takes_one_operation_per_tensor() -> None:
    # It also waits in torch.tensor([scalars on the device]), which a dispatch mode does not see.
    with emulated_cuda(), _Operations() as operations:
        local_multi_tensor_l2_norm(65536, FLAG, [_tensors()], False)
    assert operations.waits >= 1
    assert operations.count["aten::linalg_vector_norm"] > len(_tensors())


def _engine(bf16: bool, distributed: bool) -> tuple[torch.nn.Module, Any]:
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, params_dtype=dtype, bf16=bf16)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    linear: torch.nn.Module = ColumnParallelLinear(6, 10, config=config, init_method=torch.nn.init.normal_)
    linear.config = config
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, linear) if bf16 else linear)
    options = OptimizerConfig(
        lr=0.1, clip_grad=1.0, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed
    )
    return model, get_megatron_optimizer(options, [model])


def _train(bf16: bool, distributed: bool) -> tuple[list[torch.Tensor], list[float], int]:
    model, optimizer = _engine(bf16, distributed)
    norms = []
    with _Operations() as operations:
        for step in range(3):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
            norms.append(optimizer.step()[1])
    return [p.detach().clone() for p in model.parameters()], norms, operations.waits


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_steps_of_the_engine_are_the_same_with_and_without(bf16: bool, distributed: bool) -> None:
    expected, expected_norms, _ = _train(bf16, distributed)
    with active(MULTI_TENSOR + MEGATRON):
        got, norms, _ = _train(bf16, distributed)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    tensors = [t.cuda() for t in _tensors()]
    targets = [torch.empty_like(t, dtype=torch.bfloat16) for t in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, _ = l2_norm(65536, FLAG, [tensors])
        scale(65536, FLAG, [tensors, tensors], 0.5)
        copy(tensors, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(norm[0].cpu(), torch.cat([t.flatten() for t in _tensors()]).norm())
    for target, original in zip(targets, _tensors(), strict=True):
        assert torch.equal(target.cpu(), (0.5 * original).bfloat16())
