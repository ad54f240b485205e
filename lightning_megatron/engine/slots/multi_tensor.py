"""How is one operation applied to many tensors? Norm, scale and copy on torch._foreach_*, without waiting for the GPU.

Without TE and Apex, megatron-core 0.16.1 (utils.py) computes the gradient norm with one device-to-host copy per
parameter and scales in a Python loop with a temporary per tensor. Here the only wait of a step is the one ``item()`` of
the total norm in optimizer/clip_grads.py:get_grad_norm_fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.patching import Patch

_ENGINE = "megatron-core 0.16.1"
_CLIP = "megatron.core.optimizer.clip_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"


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


def _copies_shards(original: Callable[[Any], None]) -> Callable[[Any], None]:
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


def _being(stand_in: Any) -> Callable[[Any], Any]:
    return lambda original: stand_in


def _row(module: str, attribute: str, replacement: Callable[[Any], Any], reason: str) -> Patch:
    return Patch(module=module, attribute=attribute, replacement=replacement, engine=_ENGINE, reason=reason)


MULTI_TENSOR_PATCHES: tuple[Patch, ...] = (
    _row(_CLIP, "l2_norm_impl", _being(l2_norm), "one device-to-host copy per parameter and step"),
    _row(_CLIP, "multi_tensor_scale_impl", _being(scale), "a loop with a temporary and two kernels per parameter"),
    _row(_OPTIMIZER, "multi_tensor_scale_impl", _being(scale), "the same loop, used for fp16 weights"),
)
"""Gradient norm and scale where neither TE nor Apex can be used."""

COPY_PATCHES: tuple[Patch, ...] = (
    _row(_OPTIMIZER, "_multi_tensor_copy_this_to_that", _being(copy), "a loop with one kernel per bf16 parameter"),
    _row(
        _DISTRIBUTED,
        "DistributedOptimizer._copy_main_params_to_model_params",
        _copies_shards,
        "a loop with one kernel per parameter, for fp32 parameters onto themselves",
    ),
)
"""Copies between weights and master weights; not better with TE or Apex."""
