"""Kernels in place of Transformer Engine's and Apex's: many tensors at once, weight gradients, RoPE, SwiGLU.

- norm, scale and copy of many tensors by torch._foreach_*: without TE and Apex, megatron-core 0.16.1 (utils.py)
  computes the gradient norm with one device-to-host copy per parameter and scales in a Python loop with a temporary per
  tensor. Here the only wait of a step is the one ``item()`` in optimizer/clip_grads.py:get_grad_norm_fp32;
- weight gradients by one GEMM that multiplies and adds: without Apex every gradient is written in bf16 and then added
  to the fp32 buffer by another kernel. The CPU accumulates in the same place, so that a laptop runs the same path;
- RoPE by torch.compile: eagerly it is about eight kernels for each of q and k in each layer;
- SwiGLU by liger-kernel's Triton kernel, if it is installed: the place that liger-kernel 0.8's
  ``apply_liger_kernel_to_megatron`` patches, too.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# ---- many tensors at once --------------------------------------------------------------------------------------------


def l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, None]:
    """Euclidean norm of all tensors of the first list as one vector: [1], float32, on their device.

    The signature is that of ``amp_C.multi_tensor_l2norm``, whose two first arguments mean nothing here.
    """
    norms = torch._foreach_norm(list(tensor_lists[0]), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: float | Tensor) -> None:
    """Write ``factor`` times the first list into the second; signature of ``amp_C.multi_tensor_scale``."""
    sources, targets = (list(tensors) for tensors in tensor_lists)
    if not sources:
        return
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    if not (isinstance(factor, float | int) and factor == 1.0):
        torch._foreach_mul_(targets, factor)


def copy(this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` into its partner in ``that``; the dtypes may differ."""
    if this:
        torch._foreach_copy_(list(that), list(this))


@dataclass(frozen=True)
class _ShardCopies:
    """The copies from the fp32 shards of one ``DistributedOptimizer`` into its parameter buffers."""

    sources: list[Tensor]
    targets: list[Tensor]
    buffer_addresses: tuple[int, ...]


_shard_copies: weakref.WeakKeyDictionary[Any, _ShardCopies] = weakref.WeakKeyDictionary()


@torch.no_grad()
def copy_main_shards_to_parameters(optimizer: Any) -> None:
    """Write the updated fp32 shards of a ``DistributedOptimizer`` into its parameter buffers.

    The lists are kept from step to step: the host has just waited for the gradient norm, so every microsecond that it
    spends here the GPU is idle.

    Args:
        optimizer: A ``DistributedOptimizer`` that has shards on this rank.
    """
    copies = _shard_copies.get(optimizer)
    if copies is None or copies.buffer_addresses != _buffer_addresses(optimizer):
        copies = _shard_copies[optimizer] = _find_shard_copies(optimizer)
    copy(copies.sources, copies.targets)


def _find_shard_copies(optimizer: Any) -> _ShardCopies:
    copies = _ShardCopies([], [], _buffer_addresses(optimizer))
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
                    copies.sources.append(main)
                    copies.targets.append(target)
    return copies


def _buffer_addresses(optimizer: Any) -> tuple[int, ...]:
    return tuple(buffer.param_data.data_ptr() for buffer in optimizer.buffers)


def _shard_in_buffer(optimizer: Any, parameter: Tensor) -> Tensor:
    buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
    place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    bucket: Tensor = optimizer.buffers[buffer_index].buckets[bucket_index].param_data
    return bucket.view(-1)[place.start : place.end].detach()


def copies_shards(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``DistributedOptimizer._copy_main_params_to_model_params`` by ``copy_main_shards_to_parameters``."""

    def _copy_main_params_to_model_params(self: Any) -> None:
        if self.is_stub_optimizer:
            return
        # FP8 parameters and other owners of the main weights are the engine's business.
        if (
            self.ddp_config.use_megatron_fsdp
            or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            or self.model_chunks[0].config.fp8
        ):
            original(self)
        else:
            copy_main_shards_to_parameters(self)

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


class WeightGradient:
    """The two functions of Apex's extension that the engine calls."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


# ---- RoPE ------------------------------------------------------------------------------------------------------------

_Rope = Callable[..., Tensor]

MAX_SHAPES = 4
"""Shapes that are compiled, with and without gradients each; torch's own limit is eight graphs per function.

Training and validation need two (q and k) to four. Prompts have all lengths, which are not worth compiling.
"""

MAX_STEP_SHAPES = 8
"""Shapes of single tokens that are compiled, q and k of each number of rows that are continued together."""


class CompiledRope:
    """The eager function for shapes that come and go, a compiled one for the first few that come."""

    def __init__(self, eager: _Rope) -> None:
        """Wrap ``eager``, which is ``_apply_rotary_pos_emb_bshd`` of the engine."""
        self.eager = eager
        self.compiled: _Rope = torch.compile(eager, dynamic=False)
        self.compiled_step: _Rope = torch.compile(_with_own_code(eager), dynamic=False)
        self._shapes: dict[Any, set[tuple[torch.Size, torch.Size, torch.dtype]]] = {
            key: set() for key in (True, False, "step")
        }

    def __call__(
        self,
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        """Rotate ``t``: [s, b, np, hn] by ``freqs``: [s, 1, 1, rotated], float32 angles."""
        # Prompts must not use up the places of the tokens behind them, each of which is a pass of its own.
        is_step = t.shape[0] == 1 and not torch.is_grad_enabled()
        seen = self._shapes["step" if is_step else torch.is_grad_enabled()]
        shape = (t.shape, freqs.shape, t.dtype)
        if shape not in seen:
            if not t.is_cuda or len(seen) >= (MAX_STEP_SHAPES if is_step else MAX_SHAPES):
                return self.eager(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
            seen.add(shape)
        compiled = self.compiled_step if is_step else self.compiled
        return compiled(t, freqs, rotary_interleaved, multi_latent_attention, mscale)


def _with_own_code(function: Any) -> _Rope:
    """The same function to Python and another one to torch, which counts graphs by code objects and stops at eight."""
    name = f"{function.__name__}_of_one_token"
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


@functools.cache
def compiled_rope(eager: _Rope) -> CompiledRope:
    """One wrapper per function, so that a second fit in the same process does not compile again."""
    return eager if isinstance(eager, CompiledRope) else CompiledRope(eager)


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
