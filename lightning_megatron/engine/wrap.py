"""Wrappers of model chunks: 16-bit precision, and DDP for training."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from lightning_megatron.engine.microbatch_graph import MicrobatchGraphs
from lightning_megatron.engine.ops import context, split_linear
from lightning_megatron.engine.ops.fp8 import use_fp8
from lightning_megatron.engine.ops.router import keep_biases_in_fp32
from lightning_megatron.engine.overrides import build_config
from lightning_megatron.engine.settings import EngineSettings, Recipe
from lightning_megatron.errors import ConfigError


def unwrap(chunk: torch.nn.Module) -> Any:
    """The model inside its wrappers."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def to_16bit(
    chunks: torch.nn.ModuleList,
    dtype: torch.dtype,
    fp8: Recipe | None,
) -> torch.nn.ModuleList:
    """Wrap chunks to compute in ``dtype`` and return fp32 from the last stage, unless ``dtype`` is fp32.

    Evaluation needs no other wrapper. With ``fp8`` the linear layers of transformer layers multiply in fp8.
    """
    if dtype is torch.float32:
        return chunks
    if fp8 is not None:
        use_fp8(chunks)
    wrapped = torch.nn.ModuleList()
    for chunk in chunks:
        if unwrap(chunk) is chunk:
            chunk = Float16Module(chunk.config, chunk)
            chunk.register_load_state_dict_pre_hook(_find_unwrapped_names)
        wrapped.append(chunk)
    keep_biases_in_fp32(wrapped)
    return wrapped


def to_ddp(
    chunks: torch.nn.ModuleList,
    settings: EngineSettings,
    graphs: MicrobatchGraphs | None = None,
) -> torch.nn.ModuleList:
    """Wrap chunks in DDP for training: fp32 gradient buffers, reduced over dp; on the stream of ``graphs``, if any.

    Raises:
        ConfigError: If a weight has another dtype than the run's, or fp32.
    """
    _check_dtypes(chunks, settings.params_dtype)
    config = unwrap(chunks[0]).config
    if config.tp_comm_overlap:
        split_linear.use_for_linears(chunks)
    if config.context_parallel_size > 1 and config.cp_comm_type == "a2a":
        context.use_peer_copies(chunks)
    wrapped = torch.nn.ModuleList()
    with contextlib.nullcontext() if graphs is None else graphs.on_stream():
        for index, chunk in enumerate(chunks):
            wrapped.append(_ddp(_without_stale_ddp(chunk), settings, index))
    return wrapped


def _check_dtypes(chunks: torch.nn.ModuleList, expected: torch.dtype) -> None:
    for name, weight in chunks.named_parameters():
        if weight.dtype not in (expected, torch.float32):
            raise ConfigError(
                f"{name}: expected a weight in {expected}, as Trainer(precision=...) says, got {weight.dtype}; leave "
                "out module.half() and the like, and set precision"
            )


def _without_stale_ddp(chunk: Any) -> Any:
    """The chunk, without the DDP of an earlier fit if other weights were frozen then, or have other memory now."""
    if not isinstance(chunk, DistributedDataParallel):
        return chunk
    weights = list(chunk.parameters())
    in_buckets = chunk.param_to_bucket_group
    is_frozen_alike = all(weight.requires_grad == (weight in in_buckets) for weight in weights)
    if is_frozen_alike and _has_weights_in_buffers(chunk):
        return chunk
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook()
    chunk.grad_accs.clear()  # otherwise their hooks would fire with those of the next DDP
    for weight in weights:
        weight.__dict__.pop("main_grad", None)
    return chunk.module


def _has_weights_in_buffers(chunk: DistributedDataParallel) -> bool:
    """Whether the weights are still the parts of DDP's buffers through which the optimizer writes them."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.param_data is None:
            continue
        memory = buffer.param_data.untyped_storage().data_ptr()
        if any(weight.untyped_storage().data_ptr() != memory for weight in buffer.param_index_map):
            return False
    return True


def _ddp(
    chunk: torch.nn.Module,
    settings: EngineSettings,
    index: int,
) -> DistributedDataParallel:
    if isinstance(chunk, DistributedDataParallel):
        return chunk
    model = unwrap(chunk)
    if model.config.recompute_granularity == "full" and hasattr(model, "embedding"):
        model.embedding.register_forward_hook(_require_gradient)
    chosen = {
        "use_distributed_optimizer": settings.distributed_optimizer,
        "overlap_grad_reduce": settings.overlap_communication,
        "overlap_param_gather": settings.overlaps_gathers,
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,
    }
    config = build_config(DistributedDataParallelConfig, chosen, settings.overrides.ddp)
    wrapped = DistributedDataParallel(
        model.config,
        config,
        chunk,
        # As in Megatron-LM, training/training.py:get_model: communication of later chunks overlaps with compute anyway.
        disable_bucketing=index > 0,
    )
    wrapped.register_load_state_dict_pre_hook(_find_unwrapped_names)
    wrapped.broadcast_params()
    for weight in wrapped.parameters():
        # Autograd functions that write main_grad read it (ops/weight_gradients.py).
        weight.is_reduced_in_backward = config.overlap_grad_reduce
    return wrapped


def _find_unwrapped_names(
    wrapper: torch.nn.Module,
    state: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Hook of wrappers that lets a module load its own ``state_dict``, in which they leave out their ``module.``.

    megatron-core 0.16.1, transformer/module.py and distributed/distributed_data_parallel.py: ``state_dict``.
    """
    inner = f"{prefix}module."
    for name in list(state):
        if name.startswith(prefix) and not name.startswith(inner):
            state[inner + name.removeprefix(prefix)] = state.pop(name)


def _require_gradient(
    module: torch.nn.Module,
    inputs: Any,
    output: torch.Tensor,
) -> torch.Tensor:
    """Forward hook of frozen embeddings: recomputed layers get no gradients unless their input requires one.

    megatron-core 0.16.1, tensor_parallel/random.py: ``CheckpointFunction`` does not see the weights.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        return output.detach().requires_grad_()
    return output


def finish_parameter_gathers(chunks: list[Any]) -> None:
    """All-gather now the parameters that overlapped communication would gather in the next forward pass."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
