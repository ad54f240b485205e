"""Weight gradients of linears and embeddings, added to the gradient buffers where they are computed.

Linears accumulate by one GEMM, cuBLAS's as in Apex's extension, and embeddings add to rows of the buffer: otherwise
every gradient is written in bf16 and then added to the fp32 buffer by another kernel. The CPU accumulates in the same
place, so that a laptop runs the same path. The bias of a linear is added by its GEMM, too.

A parameter whose gradient is in its buffer already need not be an input of the autograd function, unless a hook
waits for it: autograd would visit it, and run that of DDP, for each parameter and microbatch. Small models wait for the
host; of a layer of BERT-large 8 of 12 parameters are those of linears.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def accumulate_weight_gradient(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_output.t() @ total_input`` to ``main_grad`` in place.

    Args:
        total_input: The layer's input, [s * b, in].
        grad_output: Gradient of its output, [s * b, out], in the dtype of ``total_input``.
        main_grad: [out, in], in the same dtype or float32.
    """
    if main_grad.dtype == total_input.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    elif main_grad.is_cuda:
        # torch >= 2.10: accumulates half-precision products in float32, in the GEMM's epilogue.
        torch.addmm(
            main_grad,
            grad_output.t(),
            total_input,
            out_dtype=main_grad.dtype,
            out=main_grad,
        )
    else:
        dtype = main_grad.dtype
        main_grad.addmm_(grad_output.t().to(dtype), total_input.to(dtype))


def placeholder_gradient(weight: Any) -> Tensor | None:
    """Gradient that autograd gets for ``weight``, whose real gradient was added to ``main_grad``.

    megatron-core 0.16.1, tensor_parallel/layers.py: any tensor, so that the hook that reduces gradients runs; zeros for
    a tied weight, as autograd adds them to the gradient of its other use.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


class WeightGradient:
    """Functions of Apex's ``fused_weight_gradient_mlp_cuda`` that the engine calls."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


def has_hook(parameter: Tensor) -> bool:
    """Whether a hook waits for the gradient of ``parameter``.

    One of DDP, if its reduction overlaps the backward pass (``engine/wrap.py`` sets the attribute; other wrappers may
    have hooks, too), or one that a user has registered.
    """
    if getattr(parameter, "is_reduced_in_backward", True):
        return True
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def tracked(x: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of ``parameters`` that must be inputs of an autograd function that adds their gradients to ``main_grad``.

    Args:
        x: Another input of the function. If it needs no gradient, the function must have another one that does.
        parameters: The function's parameters.
    """
    if x.requires_grad and not any(map(has_hook, parameters)):
        return ()
    return parameters


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``input @ weight.t() + bias``, [..., out], of [..., in]."""
    if bias is None:
        return torch.matmul(input, weight.t())
    product = torch.addmm(bias, input.flatten(0, -2), weight.t())
    # Not a view, whose padding columns could not be overwritten (models/gpt.py).
    output: Tensor = torch.ops.aten._unsafe_view(product, (*input.shape[:-1], weight.shape[0]))
    return output


class _Linear(torch.autograd.Function):
    """Linear without communication."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        parameters: tuple[Tensor, Tensor | None],
        *inputs: Tensor,
    ) -> Tensor:
        """Multiply; ``inputs`` are those of ``parameters`` that autograd knows of."""
        ctx.save_for_backward(input)
        ctx.parameters = parameters
        ctx.inputs = inputs
        return _multiply(input, *parameters)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        gradient = upstream[0].flatten(0, -2)
        d_input = None
        if ctx.needs_input_grad[0]:
            d_input = gradient.mm(weight).view(input.shape)
        # By name in the class, where a test can look on.
        WeightGradient.wgrad_gemm_accum_fp32(input.flatten(0, -2), gradient, weight.main_grad)
        if bias is not None and bias.requires_grad:
            bias.main_grad.add_(gradient.sum(0))
        return d_input, None, *(placeholder_gradient(each) for each in ctx.inputs)


def local_linear(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``linear_with_grad_accumulation_and_async_allreduce`` whose calls without communication take a shorter way.

    The engine's autograd function is made for all ways of communication, and for autocast. Both passes of a layer of
    BERT took 1,270 us of a CPU core, and take 1,020 with this one and without mappings over a group of one rank.
    """

    @functools.wraps(original)  # which remembers its warnings in an attribute
    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        communicates = allreduce_dgrad or sequence_parallel or options.get("gtp_remat_size", 1) > 1
        is_plain = (
            gradient_accumulation_fusion
            and grad_output_buffer is None
            and not torch.is_autocast_enabled(input.device.type)
        )
        if communicates or others or not is_plain:
            return original(
                input,
                weight,
                bias,
                gradient_accumulation_fusion,
                allreduce_dgrad,
                sequence_parallel,
                grad_output_buffer,
                *others,
                **options,
            )
        if not torch.is_grad_enabled():
            return _multiply(input, weight, bias)
        parameters = (weight,) if bias is None else (weight, bias)
        inputs = tracked(input, parameters)
        output: Tensor = _Linear.apply(input, (weight, bias), *inputs)  # type: ignore[no-untyped-call]
        return output

    return linear


def with_trained_bias(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``linear_with_frozen_weight`` whose bias is trained if it is not frozen, too; Megatron's gives it no gradient."""

    def linear(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *others: Any,
        **options: Any,
    ) -> Tensor:
        if bias is None or not bias.requires_grad:
            return original(input, weight, bias, *others, **options)
        return original(input, weight, None, *others, **options) + bias

    return linear


def unless_alone(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A mapping of a tensor over a group, without the autograd function that does nothing in a group of one rank."""

    def mapping(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        if group is not None and group.size() == 1:
            return input_
        return original(input_, group=group)

    return mapping


def fuse_linear_bias(original: Callable[..., Tensor]) -> Any:
    """``LinearWithGradAccumulationAndAsyncCommunication.forward`` with the bias added by the GEMM.

    Its own addition is a pass over the output at a third of the memory bandwidth: H200, 12,288 x 3,840, 0.12 ms.
    """

    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *options: Any,
    ) -> Tensor:
        if bias is None:
            return original(ctx, input, weight, bias, *options)
        fuses, reduces, is_sequence_parallel, *others = options
        # Prepares ctx for the backward pass.
        original(ctx, input[:0], weight, bias, fuses, reduces, False, *others)
        ctx.save_for_backward(input, weight)
        ctx.sequence_parallel = is_sequence_parallel
        if is_sequence_parallel:
            group = ctx.tp_group  # not by position: 0.19 has another option after it
            gathered = input.new_empty(group.size() * input.shape[0], *input.shape[1:])
            dist.all_gather_into_tensor(gathered, input.contiguous(), group=group)
            input = gathered
        return _multiply(input, weight, bias)

    return staticmethod(forward)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        main_grad = weight.main_grad
        rows = upstream[0].reshape(-1, weight.shape[1])
        main_grad.index_put_((ids.flatten(),), rows.to(main_grad.dtype), accumulate=True)
        is_tied = getattr(weight, "zero_out_wgrad", False) and not hasattr(weight, "is_penalized")
        if is_tied:
            # The output layer returns the zeros to autograd.
            return None, None
        return None, placeholder_gradient(weight)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of ``weight`` [v/tp, h]; gradients are added to ``main_grad`` if it exists.

    Otherwise a gradient of the full table is zeroed, filled, and added to the buffer in every microbatch: on an H200,
    128,256 x 4096 and 8,192 tokens, 2.74 ms instead of 0.27. As in the engine's linears, autograd gets a placeholder,
    because the hook that reduces gradients asserts that there is one.
    """
    if torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad"):
        rows: Tensor = _Embedding.apply(ids, weight)  # type: ignore[no-untyped-call]
        return rows
    return F.embedding(ids, weight)
