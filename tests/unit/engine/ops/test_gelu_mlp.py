"""MLP with GELU as one function: its products, whole trainings with it, and what it must leave to Megatron's MLP."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.engine.ops.cublaslt import gelu_gradient, linear_and_gelu
from tests.checkpoint.runs import callback
from tests.marks import on_gpus
from tests.parity.comparison import assert_same_run, assert_same_within_rounding, relative_error
from tests.parity.training import (
    Case,
    Layout,
    join_outcomes,
    loader_of,
    module_of,
    outcome,
    train,
    train_module,
)
from tests.ranks import run_ranks

GPT2 = Case(model_fields=(("n_embd", 128), ("activation_function", "gelu_new")))
"""A width with which parameters are aligned in their buffers as cuBLASLt wants them."""

# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_equal_linears_and_gelu_in_fp64(dtype: torch.dtype) -> None:
    tokens, width, inner = 200, 128, 512

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    x, gradient = random(tokens, width), random(tokens, width)
    fc1, bias, fc2 = random(inner, width) / 8, random(inner), random(width, inner) / 8
    products = linear_and_gelu(x, fc1, bias)
    assert products is not None
    before, activated = products
    exact = F.linear(x.double(), fc1.double(), bias.double())
    # Rounded once.
    half_a_step = torch.finfo(dtype).eps / 2
    assert relative_error(before.double(), exact) < half_a_step
    exact_gelu = F.gelu(exact, approximate="tanh")
    assert relative_error(activated.double(), exact_gelu) < half_a_step
    d_before = gelu_gradient(gradient, fc2, before)
    assert d_before is not None
    exact_gradient = torch.ops.aten.gelu_backward(
        gradient.double() @ fc2.double(), before.double(), approximate="tanh"
    )
    assert relative_error(d_before.double(), exact_gradient) < half_a_step


@pytest.mark.parametrize("device", ["cpu", on_gpus(1, "cuda")])
def test_what_cublaslt_cannot_multiply_is_left_to_the_caller(device: str) -> None:
    wide = torch.randn(16, 129, device=device).bfloat16()
    strided, aligned = wide[:, 1:], wide[:, :128].contiguous()
    bias = torch.randn(16, device=device).bfloat16()
    assert linear_and_gelu(strided, aligned, bias) is None
    assert linear_and_gelu(aligned.float(), aligned.float(), bias.float()) is None
    assert gelu_gradient(strided.t(), aligned, aligned) is None
    assert gelu_gradient(aligned.double(), aligned.double(), aligned.double()) is None


# ---- trainings -------------------------------------------------------------------------------------------------------


@contextmanager
def _fused() -> Iterator[None]:
    """On a CPU, too, where torch has no products with GELU."""
    from megatron.core.transformer.mlp import MLP

    from lightning_megatron.engine.ops.gelu_mlp import fuse_gelu

    with patch.object(MLP, "forward", fuse_gelu(MLP.forward)):
        yield


def _train_fused(case: Case) -> tuple[Any, int]:
    """The outcome, and how many MLPs were one function."""
    from lightning_megatron.engine.ops.gelu_mlp import GeluMLP

    with _fused(), patch.object(GeluMLP, "apply", wraps=GeluMLP.apply) as apply:
        return train(case), apply.call_count


@pytest.mark.parametrize(
    ("layout", "mlps"),
    [
        (Layout(), 4),
        (Layout(recompute="full"), 2 * 4),
        # DDP's hooks wait for parameters before, and for gradients after the products.
        (Layout(pp=2, dp=2, num_microbatches=2, overlap_communication=True), 2 * 2),
    ],
    ids=str,
)
def test_training_equals_megatrons_mlp(layout: Layout, mlps: int) -> None:
    case = replace(GPT2, layout=layout)
    ranks = run_ranks(_train_fused, layout.world_size, case)
    assert [calls for _, calls in ranks] == [mlps * case.steps] * layout.world_size
    assert_same_run(join_outcomes([each for each, _ in ranks]), outcome(case))


def _products_on_a_gpu(case: Case) -> tuple[Any, list[bool]]:
    from lightning_megatron.engine.ops import gelu_mlp

    used = []

    def noted(product: Callable[..., Any]) -> Any:
        def multiply(*operands: Tensor) -> Any:
            result = product(*operands)
            used.append(result is not None)
            return result

        return multiply

    names = ("linear_and_gelu", "gelu_gradient")
    patches = {name: noted(getattr(gelu_mlp, name)) for name in names}
    with patch.multiple(gelu_mlp, **patches):
        return train(case), used


@pytest.mark.gpu(1)
def test_bf16_training_on_a_gpu_is_as_close_to_fp32_as_megatrons_mlp() -> None:
    case = replace(GPT2, accelerator="gpu", precision="bf16-mixed")
    ((fused, used),) = run_ranks(_products_on_a_gpu, 1, case)
    assert used == [True] * (4 * 2 * case.steps)
    apart = replace(case, layout=Layout(recompute="selective"))
    assert_same_within_rounding(join_outcomes([fused]), outcome(apart), outcome(GPT2))


# ---- what sees the linears -------------------------------------------------------------------------------------------


def _nothing(*args: Any) -> None:
    """Hook that looks on."""


@contextmanager
def _registered(handle: Any) -> Iterator[None]:
    yield
    handle.remove()


@contextmanager
def _set_to(value: Any, undo: Callable[[], Any]) -> Iterator[None]:
    yield
    undo()


def _reasons(mlp: Any) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Ways to see or change what is between the linears, or their gradients."""
    fc1, fc2, config = mlp.linear_fc1, mlp.linear_fc2, mlp.config
    erf = patch.object(mlp, "activation_func", F.gelu)
    other = patch.object(mlp, "activation_func", partial(F.gelu, approximate="none"))
    return {
        "forward hook": lambda: _registered(fc1.register_forward_hook(_nothing)),
        "forward pre-hook": lambda: _registered(fc2.register_forward_pre_hook(_nothing)),
        "backward hook": lambda: _registered(fc2.register_full_backward_hook(_nothing)),
        "backward pre-hook": lambda: _registered(fc1.register_full_backward_pre_hook(_nothing)),
        "hook of all modules": lambda: _registered(
            torch.nn.modules.module.register_module_forward_hook(_nothing)
        ),
        "forward of its own": lambda: patch.object(fc1, "forward", fc1.forward),
        "product of its own": lambda: patch.object(fc2, "_forward_impl", fc2._forward_impl),
        "class of its own": lambda: patch.object(type(fc2), "forward", _nothing),
        "not a linear of Megatron's": lambda: patch.dict(
            mlp._modules, linear_fc1=torch.nn.Linear(128, 512)
        ),
        "frozen weight": lambda: _set_to(
            fc1.weight.requires_grad_(False), fc1.weight.requires_grad_
        ),
        "frozen bias": lambda: _set_to(fc1.bias.requires_grad_(False), fc1.bias.requires_grad_),
        "evaluation": lambda: _set_to(mlp.eval(), mlp.train),
        "erf": lambda: erf,
        "erf by name": lambda: other,
        "autocast": lambda: torch.autocast("cpu"),
        "recomputed activation": lambda: patch.multiple(
            config, recompute_granularity="selective", recompute_modules=["layernorm"]
        ),
        "gates": lambda: patch.object(config, "gated_linear_unit", True),
        "fused activation": lambda: patch.object(config, "bias_activation_fusion", True),
        "gradients of autograd": lambda: patch.object(fc2, "gradient_accumulation_fusion", False),
        "bias added later": lambda: patch.object(fc1, "skip_bias_add", True),
        "bias added at once": lambda: patch.object(fc2, "skip_bias_add", False),
    }


def _who_runs() -> dict[str, bool]:
    """Whether Megatron's MLP runs, for each reason and for none, before and after them."""
    from lightning_megatron.engine.ops.gelu_mlp import fuse_gelu

    megatrons = {}

    def try_all(trainer: Any, pl_module: Any) -> None:
        mlp = next(each for name, each in pl_module.named_modules() if name.endswith(".mlp"))
        forward = fuse_gelu(lambda *args, **others: (torch.tensor(0.0), None))

        def is_megatrons() -> bool:
            output, _ = forward(mlp, torch.randn(4, 2, 128))
            return output.dim() == 0

        megatrons["none"] = is_megatrons()
        for reason, applied in _reasons(mlp).items():
            with applied():
                megatrons[reason] = is_megatrons()
        megatrons["none any more"] = is_megatrons()

    options = {"callbacks": [callback(on_train_batch_start=lambda *args: try_all(*args[:2]))]}
    case = replace(GPT2, steps=1)
    train_module(module_of(case), case, loader_of(case), **options)
    return megatrons


def test_mlp_whose_parts_are_seen_or_changed_is_megatrons() -> None:
    (megatrons,) = run_ranks(_who_runs, 1)
    fused = [reason for reason, is_megatrons in megatrons.items() if not is_megatrons]
    assert fused == ["none", "none any more"]
