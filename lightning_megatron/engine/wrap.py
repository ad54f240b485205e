"""How does a plain model chunk become one that trains in parallel? 16-bit wrapper, then Megatron's DDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from lightning_megatron.engine.dtypes import DtypePolicy


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """How gradients travel between data-parallel ranks."""

    distributed_optimizer: bool = True
    """Whether each data-parallel rank keeps only its part of the optimizer state (ZeRO-1)."""
    overlap: bool = False
    """Whether gradients are reduced during the backward pass and parameters gathered during the next forward pass."""


def unwrap(chunk: torch.nn.Module) -> Any:
    """The plain model inside any wrappers."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def to_16bit(chunks: torch.nn.ModuleList, dtypes: DtypePolicy) -> torch.nn.ModuleList:
    """Chunks that compute in 16 bits and return fp32 from the last stage, if ``dtypes`` says so; needed to evaluate."""
    if not dtypes.is_16bit:
        return chunks
    return torch.nn.ModuleList([c if _is_wrapped(c) else Float16Module(unwrap(c).config, c) for c in chunks])


def _is_wrapped(chunk: torch.nn.Module) -> bool:
    return isinstance(chunk, (DistributedDataParallel, Float16Module))


def to_ddp(chunks: torch.nn.ModuleList, reduction: GradientReduction) -> torch.nn.ModuleList:
    """Chunks whose gradients land in fp32 buffers that data-parallel ranks reduce; needed to train."""
    return torch.nn.ModuleList([_ddp(_with_current_buffers(c), reduction, i) for i, c in enumerate(chunks)])


def _with_current_buffers(chunk: Any) -> Any:
    """The chunk, without the DDP of an earlier fit if others of its weights were frozen then."""
    weights = list(chunk.parameters())
    is_wrapped = isinstance(chunk, DistributedDataParallel)
    if not is_wrapped or all(w.requires_grad == (w in chunk.param_to_bucket_group) for w in weights):
        return chunk
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook()
    chunk.grad_accs.clear()  # or their hooks would fire beside those of the next DDP
    for weight in weights:
        weight.__dict__.pop("main_grad", None)
    return chunk.module


def _ddp(chunk: torch.nn.Module, reduction: GradientReduction, index: int) -> DistributedDataParallel:
    if isinstance(chunk, DistributedDataParallel):
        return chunk
    model = unwrap(chunk)
    if model.config.recompute_granularity == "full" and hasattr(model, "embedding"):
        model.embedding.register_forward_hook(_with_gradient)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=reduction.distributed_optimizer,
        overlap_grad_reduce=reduction.overlap,
        overlap_param_gather=reduction.overlap and reduction.distributed_optimizer,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
    )
    wrapped = DistributedDataParallel(
        model.config,
        config,
        chunk,
        # Megatron-LM, training/training.py:get_model: later chunks run while the first is already waiting.
        disable_bucketing=index > 0,
    )
    wrapped.broadcast_params()
    return wrapped


def _with_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Frozen embeddings as if trained: layers that are recomputed have no gradients unless their input has one.

    megatron-core 0.16.1, tensor_parallel/random.py: ``CheckpointFunction`` does not see the weights.
    """
    return output.detach().requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def finish_parameter_gathers(chunks: list[Any]) -> None:
    """Gather parameters now that overlapped communication would gather in the next forward pass."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def connect_schedule(chunks: list[Any], finalize: Any, scale_loss: Any) -> None:
    """Give every chunk's config the functions that the schedule calls around a step.

    Each chunk has its own reference to the config, and the schedule reads the first one's, so all get all.
    """
    no_sync = [c.no_sync for c in chunks]
    for chunk in chunks:
        config = unwrap(chunk).config
        config.finalize_model_grads_func = finalize
        config.grad_scale_func = scale_loss
        if chunk.ddp_config.overlap_grad_reduce:
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
