"""Wrappers of model chunks for training (16-bit, DDP), and gradients of weights shared by several pipeline stages.

Copies of a shared weight start equal, because weights are initialized by name, and optimizers update them equally if
their gradients are equal, so gradients are summed over the pipeline. Megatron-Core does this itself for tied embeddings
(distributed/finalize_model_grads.py); a model with other shared weights returns them from ``shared_weights``: every
chunk with layers of a T5's encoder or decoder has the table of relative positions of that stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from lightning_megatron.engine.microbatch_graph import MicrobatchGraphs
from lightning_megatron.engine.ops import context, split_linear
from lightning_megatron.engine.ops.fp8 import Recipe, use_fp8
from lightning_megatron.engine.overrides import build_config
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.models.transformer_config import EngineSettings


def unwrap(chunk: torch.nn.Module) -> Any:
    """The model inside its wrappers."""
    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def to_16bit(
    chunks: torch.nn.ModuleList, dtype: torch.dtype, fp8: Recipe | None
) -> torch.nn.ModuleList:
    """Wrap chunks to compute in ``dtype`` and return fp32 from the last stage, unless ``dtype`` is fp32.

    Evaluation needs no other wrapper. With ``fp8`` the linear layers of transformer layers multiply in fp8.
    """
    if dtype is torch.float32:
        return chunks
    if fp8 is not None:
        use_fp8(chunks)
    return torch.nn.ModuleList(
        [c if unwrap(c) is not c else Float16Module(unwrap(c).config, c) for c in chunks]
    )


def to_ddp(
    chunks: torch.nn.ModuleList, settings: EngineSettings, graphs: MicrobatchGraphs | None = None
) -> torch.nn.ModuleList:
    """Wrap chunks in DDP for training: fp32 gradient buffers, reduced over dp; on the stream of ``graphs``, if any."""
    config = unwrap(chunks[0]).config
    if config.tp_comm_overlap:
        split_linear.use_for_linears(chunks)
    if config.context_parallel_size > 1 and config.cp_comm_type == "a2a":
        context.use_peer_copies(chunks)
    with contextlib.nullcontext() if graphs is None else graphs.on_stream():
        return torch.nn.ModuleList(
            [_ddp(_without_stale_ddp(c), settings, i) for i, c in enumerate(chunks)]
        )


def _without_stale_ddp(chunk: Any) -> Any:
    """The chunk, without the DDP of an earlier fit if other weights were frozen in that fit."""
    weights = list(chunk.parameters())
    is_wrapped = isinstance(chunk, DistributedDataParallel)
    if not is_wrapped or all(
        w.requires_grad == (w in chunk.param_to_bucket_group) for w in weights
    ):
        return chunk
    if chunk.use_forward_hook:
        chunk.disable_forward_pre_hook()
    chunk.grad_accs.clear()  # otherwise their hooks would fire with those of the next DDP
    for weight in weights:
        weight.__dict__.pop("main_grad", None)
    return chunk.module


def _ddp(chunk: torch.nn.Module, settings: EngineSettings, index: int) -> DistributedDataParallel:
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
    wrapped.broadcast_params()
    return wrapped


def _require_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of frozen embeddings: recomputed layers get no gradients unless their input requires one.

    megatron-core 0.16.1, tensor_parallel/random.py: ``CheckpointFunction`` does not see the weights.
    """
    return (
        output.detach().requires_grad_()
        if torch.is_grad_enabled() and not output.requires_grad
        else output
    )


def finish_parameter_gathers(chunks: list[Any]) -> None:
    """All-gather now the parameters that overlapped communication would gather in the next forward pass."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


# ---- weights shared by several stages --------------------------------------------------------------------------------


class SharedWeights(NamedTuple):
    """Weights that several chunks of a pipeline hold, as ``shared_weights()`` of a model that has some returns them."""

    shape: tuple[int, ...]
    """Shape of this tensor-parallel rank's shard of each weight."""
    weights: Mapping[str, torch.nn.Parameter | None]
    """This chunk's copies by name; None for weights it does not have. All weights, in the same order on every chunk."""


def mark_shared_weight(parameter: torch.nn.Parameter, *, is_owner: bool) -> None:
    """Mark a weight as shared with other stages, for Megatron; before the chunk is wrapped.

    Args:
        parameter: This chunk's copy.
        is_owner: Whether this copy counts in the gradient norm.
    """
    # It gets its own DDP bucket: with the distributed optimizer the shards of the data-parallel ranks must be the same
    # on all stages, or reduced gradients would be added to unreduced ones.
    parameter.shared_embedding = True  # type: ignore[attr-defined]
    parameter.shared = not is_owner  # type: ignore[attr-defined]


def freeze_shared_weights(chunks: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Freeze all copies of a shared weight that is frozen on any stage. Collective over ``group``, all ranks.

    Raises:
        ConfigError: On all ranks, if nothing is left to train.
    """
    models = [unwrap(chunk) for chunk in chunks]
    copies: list[tuple[str, torch.nn.Parameter]] = []
    for model in models:
        if hasattr(model, "shared_weights"):
            copies += [
                (name, weight)
                for name, weight in model.shared_weights().weights.items()
                if weight is not None
            ]
        is_tied = getattr(model, "share_embeddings_and_output_weights", False)
        if is_tied and (model.pre_process or model.post_process):
            copies.append(("word embeddings", model.shared_embedding_or_output_weight()))
    is_trained = any(weight.requires_grad for model in models for weight in model.parameters())
    of_ranks: list[tuple[bool, set[str]]] = [(False, set())] * dist.get_world_size(group)
    frozen = {name for name, weight in copies if not weight.requires_grad}
    dist.all_gather_object(of_ranks, (is_trained, frozen), group=group)
    if not any(trained for trained, _ in of_ranks):
        raise ConfigError(
            "every weight is frozen, and fit needs some to train; unfreeze some in configure_model"
        )
    for name, weight in copies:
        if any(name in names for _, names in of_ranks):
            weight.requires_grad_(False)


def reduce_shared_gradients(chunks: Sequence[Any], pp_group: dist.ProcessGroup) -> None:
    """All-reduce the gradients of shared weights over the pp group, in one call, if the model has any.

    Every rank of ``pp_group`` must call, after gradients were reduced over dp.

    Args:
        chunks: This rank's chunks.
        pp_group: The stages of one pipeline.
    """
    per_chunk = [
        model.shared_weights() for model in map(unwrap, chunks) if hasattr(model, "shared_weights")
    ]
    if dist.get_world_size(pp_group) == 1 or not per_chunk:
        return
    sums = torch.zeros(
        len(per_chunk[0].weights), *per_chunk[0].shape, device=next(chunks[0].parameters()).device
    )
    of_chunks = (zip(sums, shared.weights.values(), strict=True) for shared in per_chunk)
    pairs = (
        (total, getattr(weight, "main_grad", None)) for each in of_chunks for total, weight in each
    )
    copies = [
        (total, gradient) for total, gradient in pairs if gradient is not None
    ]  # a frozen weight has none
    for total, gradient in copies:
        total += gradient
    dist.all_reduce(sums, group=pp_group)
    for total, gradient in copies:
        gradient.copy_(total)
