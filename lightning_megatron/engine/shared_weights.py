"""Weights shared by several pipeline stages: their gradients are summed over the pipeline.

Copies of a shared weight start equal, because weights are initialized by name, and optimizers update them equally if
their gradients are equal, so gradients are summed over the pipeline. Megatron-Core does this itself for tied embeddings
(distributed/finalize_model_grads.py); a model with other shared weights returns them from ``shared_weights``: every
chunk with layers of a T5's encoder or decoder has the table of relative positions of that stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError


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
            shared = model.shared_weights().weights
            for name, weight in shared.items():
                if weight is not None:
                    copies.append((name, weight))
        is_tied = getattr(model, "share_embeddings_and_output_weights", False)
        if is_tied and (model.pre_process or model.post_process):
            copies.append(("word embeddings", model.shared_embedding_or_output_weight()))
    is_trained = any(weight.requires_grad for model in models for weight in model.parameters())
    frozen = {name for name, weight in copies if not weight.requires_grad}
    of_ranks = gather_objects((is_trained, frozen), group)
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
    models = [unwrap(chunk) for chunk in chunks]
    per_chunk = [model.shared_weights() for model in models if hasattr(model, "shared_weights")]
    if dist.get_world_size(pp_group) == 1 or not per_chunk:
        return
    sums = torch.zeros(
        len(per_chunk[0].weights),
        *per_chunk[0].shape,
        device=next(chunks[0].parameters()).device,
    )
    copies = []
    for shared in per_chunk:
        for total, weight in zip(sums, shared.weights.values(), strict=True):
            gradient = getattr(weight, "main_grad", None)
            if gradient is not None:  # a frozen weight has none
                total += gradient
                copies.append((total, gradient))
    dist.all_reduce(sums, group=pp_group)
    for total, gradient in copies:
        gradient.copy_(total)
