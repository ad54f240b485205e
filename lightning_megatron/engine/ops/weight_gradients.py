"""Weight gradients of linears and embeddings, added to the gradient buffers where they are computed.

Linears accumulate by one GEMM, cuBLAS's as in Apex's extension, and embeddings add to rows of the buffer: otherwise
every gradient is written in bf16 and then added to the fp32 buffer by another kernel. The CPU accumulates in the same
place, so that a laptop runs the same path. The bias of a linear is added by its GEMM, too.
"""

from __future__ import annotations

from collections.abc import Callable
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
        product = torch.addmm(bias, input.flatten(0, -2), weight.t())
        shape = [*input.shape[:-1], len(weight)]
        # Not a view, whose padding columns could not be overwritten (models/gpt.py).
        output: Tensor = torch.ops.aten._unsafe_view(product, shape)
        return output

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
        if getattr(weight, "zero_out_wgrad", False):
            # Tied: the output layer returns the zeros to autograd.
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
