"""Kernels in place of Transformer Engine's and Apex's: copies of many tensors, weight gradients, SwiGLU.

- copies of many tensors by torch._foreach_copy_, where megatron-core 0.16.1 has a kernel for each;
- weight gradients by one GEMM that multiplies and adds, cuBLAS's as in Apex's extension: without either, every gradient
  is written in bf16 and then added to the fp32 buffer by another kernel. The CPU accumulates in the same place, so that
  a laptop runs the same path;
- gradients of embeddings by adding rows to that buffer;
- SwiGLU by liger-kernel's Triton kernel, if it is installed: the place that liger-kernel 0.8's
  ``apply_liger_kernel_to_megatron`` patches, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from lightning_megatron.engine.fillers.adam import FusedAdam

# ---- many tensors at once --------------------------------------------------------------------------------------------


def copy(this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` into its partner in ``that``; the dtypes may differ."""
    if this:
        torch._foreach_copy_(list(that), list(this))


_Copies = tuple[tuple[int, ...], dict[Tensor, Tensor]]
_shard_copies: weakref.WeakKeyDictionary[Any, _Copies] = weakref.WeakKeyDictionary()
"""Of each ``DistributedOptimizer``: where its parameter buffers were, and which part of them is each shard's copy."""


def _copies_of(optimizer: Any) -> dict[Tensor, Tensor]:
    """Kept from step to step: every microsecond that the host spends here the GPU may be idle."""
    addresses = tuple(buffer.param_data.data_ptr() for buffer in optimizer.buffers)
    if optimizer not in _shard_copies or _shard_copies[optimizer][0] != addresses:
        _shard_copies[optimizer] = addresses, _find_shard_copies(optimizer)
    return _shard_copies[optimizer][1]


def _find_shard_copies(optimizer: Any) -> dict[Tensor, Tensor]:
    copies: dict[Tensor, Tensor] = {}
    pairs = (
        (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
        (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
    )
    for main_groups, model_groups in pairs:
        for main_group, model_group in zip(main_groups, model_groups, strict=True):
            for main, parameter in zip(main_group, model_group, strict=True):
                target = _shard_in_buffer(optimizer, parameter)
                # float32 shards are views of the buffer: nothing to copy.
                if target.data_ptr() != main.data_ptr():
                    copies[main] = target
    return copies


def _shard_in_buffer(optimizer: Any, parameter: Tensor) -> Tensor:
    buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
    place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    bucket: Tensor = optimizer.buffers[buffer_index].buckets[bucket_index].param_data
    return bucket.view(-1)[place.start : place.end].detach()


def copies_shards(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``DistributedOptimizer._copy_main_params_to_model_params`` by one copy of all updated shards."""

    @torch.no_grad()
    def _copy_main_params_to_model_params(self: Any) -> None:
        if self.is_stub_optimizer:
            return
        if isinstance(self.optimizer, FusedAdam) and self.optimizer.has_copied:
            self.optimizer.has_copied = False
        else:
            copies = _copies_of(self)
            copy(list(copies), list(copies.values()))
            if isinstance(self.optimizer, FusedAdam):  # from the next step on
                reference = weakref.ref(self)
                self.optimizer.low_copies = lambda: _copies_of(reference())

    return _copy_main_params_to_model_params


# ---- weight gradients ------------------------------------------------------------------------------------------------


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
        # torch >= 2.10: a float32 sum of half-precision products, in the GEMM's epilogue.
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))


def summed_over_ranks(output: Tensor, linear: Any) -> Tensor:
    """What Megatron's row-parallel linear does behind its product, for one that is told not to communicate.

    Args:
        output: This rank's part of the sum over the tp group, [s, b, h].
        linear: The linear.

    Returns:
        The sum, [s, b, h], or under sequence parallelism this rank's rows of it, [s/tp, b, h]. A model in training that
        generates in between holds whole rows then.
    """
    add = (
        reduce_scatter_to_sequence_parallel_region
        if linear.sequence_parallel
        else reduce_from_tensor_model_parallel_region
    )
    summed: Tensor = add(output, group=linear.tp_group)
    return summed


def reported_gradient(weight: Any) -> Tensor | None:
    """What autograd gets for ``weight``, whose gradient was added to ``main_grad``.

    megatron-core 0.16.1, tensor_parallel/layers.py: some gradient, or the hook that reduces would not run; and zeros
    for a tied weight, to whose others this one is added.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


class WeightGradient:
    """The two functions of Apex's extension that the engine calls."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


def with_bias_in_product(original: Callable[..., Tensor]) -> Any:
    """``LinearWithGradAccumulationAndAsyncCommunication.forward`` whose product adds the bias, too, on CUDA.

    Its own addition is a pass over the output at a third of the memory's rate: H200, 12,288 x 3,840, 0.12 ms.
    """

    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        if bias is None or not input.is_cuda:
            plain: Tensor = original(ctx, input, weight, bias, *options)
            return plain
        fuses, reduces, is_sequence_parallel, *others = options
        original(ctx, input[:0], weight, bias, fuses, reduces, False, *others)  # tells ctx what going back needs
        ctx.save_for_backward(input, weight)
        ctx.sequence_parallel = is_sequence_parallel
        if is_sequence_parallel:
            group = others[-1]
            whole = input.new_empty(group.size() * input.shape[0], *input.shape[1:])
            torch.distributed.all_gather_into_tensor(whole, input.contiguous(), group=group)
            input = whole
        product = torch.addmm(bias, input.flatten(0, -2), weight.t())
        # Not a view, whose padded columns nobody could overwrite (models/chunk.py).
        output: Tensor = torch.ops.aten._unsafe_view(product, [*input.shape[:-1], len(weight)])
        return output

    return staticmethod(forward)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        rows = upstream[0].reshape(-1, weight.shape[1]).to(weight.main_grad.dtype)
        weight.main_grad.index_put_((ids.flatten(),), rows, accumulate=True)
        if getattr(weight, "zero_out_wgrad", False):
            return None, None  # tied: the output layer gives autograd the zeros that it wants
        weight.grad_added_to_main_grad = True
        return None, torch.empty_like(weight)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight`` [v/tp, h], whose gradients are added to ``main_grad`` where there is one.

    Otherwise a gradient of the whole table is zeroed, filled, and added to the buffer in every microbatch: on an H200,
    128,256 x 4096 and 8,192 tokens, 2.74 ms instead of 0.27. As in a linear of the engine, autograd gets some tensor,
    because the hook that reduces gradients asserts that there is one.
    """
    if ids.is_cuda and torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad"):
        rows: Tensor = _LookUp.apply(ids, weight)  # type: ignore[no-untyped-call]
        return rows
    return F.embedding(ids, weight)


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def liger_swiglu(original: Any) -> type:
    """A stand-in for the engine's autograd function: only its ``apply`` is ever used."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    class LigerSwiGLU:
        """SwiGLU of [tokens, 2 * ffn] -> [tokens, ffn]."""

        @staticmethod
        def apply(input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
            if fp8_input_store or cpu_offload_input:  # both change what the engine keeps for the backward
                result: Tensor = original.apply(input, fp8_input_store, cpu_offload_input)
            else:
                result = LigerFusedGateUpSiLUMulFunction.apply(input, False)
            return result

    return LigerSwiGLU
