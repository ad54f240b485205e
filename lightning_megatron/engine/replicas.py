"""How do copies of one weight on several pipeline stages stay equal? Their gradients are added over the pipeline.

Copies start equal, because weights are filled by their names, and every optimizer moves them alike if their gradients
are equal. Megatron-Core does this for tied embeddings itself (distributed/finalize_model_grads.py); a model with other
copies says which they are: T5's tables of relative positions are wherever layers of their stack are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Replicated:
    """One weight that several chunks of a pipeline hold."""

    name: str
    """The same in every chunk."""
    shape: tuple[int, ...]
    """Of this tensor-parallel rank's shard."""
    parameter: torch.nn.Parameter | None
    """This chunk's copy; None if it has none."""


@runtime_checkable
class HasReplicas(Protocol):
    """A model chunk with weights that other chunks hold too."""

    def replicated(self) -> Sequence[Replicated]:
        """All such weights of the model, on every chunk in the same order."""
        ...


def mark_replica(parameter: torch.nn.Parameter, *, is_owner: bool) -> None:
    """Tell Megatron that other stages have this weight, too; before the chunk is wrapped.

    Args:
        parameter: This chunk's copy.
        is_owner: Whether it is the one that counts in the gradient norm.
    """
    # A DDP bucket of its own: under the distributed optimizer the parts of the data-parallel ranks must be the same
    # on all stages, or reduced gradients would be added to unreduced ones.
    parameter.shared_embedding = True  # type: ignore[attr-defined]
    parameter.shared = not is_owner  # type: ignore[attr-defined]


def freeze_alike(chunks: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Freeze each copy of a weight that is frozen on any stage: it is one weight. All ranks, ``group``, must call.

    Raises:
        ConfigError: On all ranks, if nothing is left to train.
    """
    models = [unwrap(chunk) for chunk in chunks]
    copies: list[tuple[str, torch.nn.Parameter]] = []
    for model in models:
        if isinstance(model, HasReplicas):
            copies += [(weight.name, weight.parameter) for weight in model.replicated() if weight.parameter is not None]
        is_tied = getattr(model, "share_embeddings_and_output_weights", False)
        if is_tied and (model.pre_process or model.post_process):
            copies.append(("word embeddings", model.shared_embedding_or_output_weight()))
    is_trained = any(weight.requires_grad for model in models for weight in model.parameters())
    answers: list[tuple[bool, set[str]]] = [(False, set())] * dist.get_world_size(group)
    frozen = {name for name, weight in copies if not weight.requires_grad}
    dist.all_gather_object(answers, (is_trained, frozen), group=group)
    if not any(trained for trained, _ in answers):
        raise ConfigError("every weight is frozen, and fit needs some to train; unfreeze some in configure_model")
    for name, weight in copies:
        if any(name in names for _, names in answers):
            weight.requires_grad_(False)


def add_replicas(chunks: Sequence[Any], pp_group: dist.ProcessGroup) -> None:
    """Replace the gradient of each copy by the sum over all copies; one all-reduce over the pp group, if any.

    Every rank of ``pp_group`` must call, after gradients were reduced over dp.

    Args:
        chunks: This rank's chunks.
        pp_group: The stages of one pipeline.
    """
    models = [unwrap(chunk) for chunk in chunks]
    if dist.get_world_size(pp_group) == 1 or not isinstance(models[0], HasReplicas):
        return
    by_name: dict[str, list[torch.Tensor]] = {}
    totals: dict[str, torch.Tensor] = {}
    device = next(chunks[0].parameters()).device
    for weight in (weight for model in models for weight in model.replicated()):
        total = totals.setdefault(weight.name, torch.zeros(weight.shape, dtype=torch.float32, device=device))
        gradient = getattr(weight.parameter, "main_grad", None)  # a frozen weight has none
        if gradient is not None:
            by_name.setdefault(weight.name, []).append(gradient)
            total += gradient
    if not totals:
        return
    packed = torch.cat([total.flatten() for total in totals.values()])
    dist.all_reduce(packed, group=pp_group)
    sums = packed.split([total.numel() for total in totals.values()])
    for (name, total), summed in zip(totals.items(), sums, strict=True):
        for gradient in by_name.get(name, []):
            gradient.copy_(summed.view_as(total))
