"""MLP with GELU as one autograd function, whose GELU and derivative are part of matrix products (``cublaslt.py``).

Used on GPUs by tp=1 in training, where nothing else looks at what is between the two linears: neither hooks nor
adapters, fp8, recomputation of the activation or dropout. Otherwise Megatron's MLP runs. Only the tanh form of GELU
(GPT-2, StarCoder 2) has such products; that by the error function (BERT, Falcon) has none.

A step of gpt2-large, mb12 x 1, is 1.9 % faster (H200, by turns).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from lightning_megatron.engine.ops.cublaslt import gelu_gradient, linear_and_gelu
from lightning_megatron.engine.ops.recompute import recomputes_cheap_outputs
from lightning_megatron.engine.ops.weight_gradients import (
    WeightGradient,
    placeholder_gradient,
    tracked,
)

_Output = tuple[Tensor, Tensor | None]
"""Output of an MLP: [s, b, h] and a bias that is not added yet."""
_DDP = "megatron.core.distributed.distributed_data_parallel"
"""Module whose hooks wait for parameters."""


class GeluMLP(torch.autograd.Function):
    """``gelu(x @ w1.t() + b1) @ w2.t()``; gradients of the three parameters are added to ``main_grad``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameters: tuple[Tensor, Tensor, Tensor],
        *inputs: Tensor,
    ) -> Tensor:
        """Map [s, b, h] to [s, b, h]; ``inputs`` are those of ``parameters`` that autograd knows of."""
        fc1, bias, fc2 = parameters
        rows = x.flatten(0, -2)
        products = linear_and_gelu(rows, fc1, bias)
        if products is None:
            before = torch.addmm(bias, rows, fc1.t())
            products = before, F.gelu(before, approximate="tanh")
        ctx.save_for_backward(x, *products)
        ctx.parameters = parameters
        ctx.inputs = inputs
        return products[1].mm(fc2.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of ``x``; placeholders for ``inputs``."""
        x, before, activated = ctx.saved_tensors
        fc1, bias, fc2 = ctx.parameters
        gradient = upstream[0].flatten(0, -2)
        d_before = gelu_gradient(gradient, fc2, before)
        if d_before is None:
            d_activated = gradient.mm(fc2)
            d_before = torch.ops.aten.gelu_backward(d_activated, before, approximate="tanh")
        WeightGradient.wgrad_gemm_accum_fp32(activated, gradient, fc2.main_grad)
        WeightGradient.wgrad_gemm_accum_fp32(x.flatten(0, -2), d_before, fc1.main_grad)
        bias.main_grad.add_(d_before.sum(0))
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = d_before.mm(fc1).view(x.shape)
        return d_x, None, *(placeholder_gradient(each) for each in ctx.inputs)


def fuse_gelu(original: Callable[..., _Output]) -> Callable[..., _Output]:
    """``MLP.forward`` that takes ``GeluMLP`` where it can."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        per_token_scale: Any = None,
        **others: Any,
    ) -> _Output:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        can_fuse = (
            self.training
            and per_token_scale is None
            and _activates_by_gelu(self)
            and _is_plain(fc1, ColumnParallelLinear)
            and _is_plain(fc2, RowParallelLinear)
            and _has_biases_of_the_function(fc1, fc2)
            and not torch.is_autocast_enabled(hidden_states.device.type)
            and not _has_any_global_hook()
        )
        if not can_fuse:
            return original(self, hidden_states, per_token_scale, **others)
        _await_parameters(fc1)
        _await_parameters(fc2)
        parameters = (fc1.weight, fc1.bias, fc2.weight)
        inputs = tracked(hidden_states, parameters)
        output: Tensor = GeluMLP.apply(hidden_states, parameters, *inputs)  # type: ignore[no-untyped-call]
        return output, fc2.bias

    return forward


def _activates_by_gelu(mlp: Any) -> bool:
    """Whether the activation is GELU by tanh, without gates, and kept for the backward pass."""
    config = mlp.config
    activation = mlp.activation_func
    is_gelu = (
        isinstance(activation, partial)
        and activation.func is F.gelu
        and activation.keywords == {"approximate": "tanh"}
    )
    return (
        is_gelu
        and not config.gated_linear_unit
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
        and not recomputes_cheap_outputs(config)
    )


def _has_biases_of_the_function(fc1: Any, fc2: Any) -> bool:
    """Whether the first linear adds its bias, and the second one leaves its own to the caller."""
    adds_first = fc1.bias is not None and not fc1.skip_bias_add
    return adds_first and (fc2.bias is None or fc2.skip_bias_add)


def _is_plain(linear: Any, kind: type[torch.nn.Module]) -> bool:
    """Whether a linear does nothing but its product, on this rank alone, and adds its gradients to the buffers."""
    is_replaced = (
        not isinstance(linear, kind)
        or type(linear).forward is not kind.forward
        or not vars(linear).keys().isdisjoint(("forward", "_forward_impl"))
    )
    if is_replaced or _has_hooks_of_users(linear):
        return False
    communicates = linear.tp_group.size() > 1 or getattr(linear, "gtp_remat_size", 1) > 1
    if communicates or not linear.gradient_accumulation_fusion:
        return False
    parameters = [each for each in (linear.weight, linear.bias) if each is not None]
    return all(each.requires_grad and hasattr(each, "main_grad") for each in parameters)


def _has_hooks_of_users(linear: Any) -> bool:
    """Whether anyone but Megatron's DDP would see this linear called."""
    return bool(
        linear._forward_hooks
        or linear._backward_pre_hooks
        or linear._backward_hooks
        or any(hook.__module__ != _DDP for hook in linear._forward_pre_hooks.values())
    )


def _await_parameters(linear: Any) -> None:
    """Run DDP's hooks, which wait for the all-gather of parameters."""
    for hook in linear._forward_pre_hooks.values():
        hook(linear, ())
