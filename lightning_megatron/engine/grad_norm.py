"""Global gradient norm, computed on the device without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class GradientNorm:
    """Norm of the gradients of Megatron's optimizers, over all ranks."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """Read the process groups of the optimizers ``parts`` that Megatron has chained."""
        self._parts = parts
        self._groups = [part.get_grad_stats_parallel_group() for part in parts]
        """Of each part: the ranks whose gradients add up to the norm of one model copy."""
        sizes = {dist.get_world_size(group) for group in self._groups}
        self._reaches_all_ranks = sizes == {dist.get_world_size()}
        """Whether each rank's gradients reach all ranks with the norm, as with the distributed optimizer."""
        self._weights: list[tuple[list[Tensor], list[Tensor]]] | None = None
        """Of each part: weights that the norm counts, and the others (``_counted_weights``); None before a step."""

    def squared(self, loss: Tensor) -> Tensor:
        """Squared norm: [1], fp32. NaN or infinite also if the loss is: the host reads only this value.

        megatron-core 0.16.1, optimizer/clip_grads.py:get_grad_norm_fp32, without waiting for the device.
        """
        counted_by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        copies_by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        # Experts have their own optimizer and, without sharding, their own group of ranks.
        if self._weights is None:
            # Asking Megatron for each weight takes a millisecond.
            self._weights = [_counted_weights(part) for part in self._parts]
        for (counted, copies), group in zip(self._weights, self._groups, strict=True):
            counted_by_group.setdefault(group, []).extend(_gradients(counted))
            copies_by_group.setdefault(group, []).extend(_gradients(copies))
        total = torch.zeros(1, dtype=torch.float32, device=loss.device)
        for group, counted in counted_by_group.items():
            copies = copies_by_group[group]
            gradients = [*counted, 0.0 * loss, *copies]
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            num_counted = len(counted) + 1
            norm = torch.linalg.vector_norm(torch.stack(norms[:num_counted]))
            squared = norm.reshape(1) ** 2.0
            if copies:
                squared += _zero_or_nan(torch.stack(norms[num_counted:]).sum())
            dist.all_reduce(squared, group=group)
            total += squared
        if not self._reaches_all_ranks:
            # Replicas have equal gradients, unless a device computes wrongly: then all skip the step, or none.
            problems = _zero_or_nan(total)
            dist.all_reduce(problems)
            total += problems
        return total


def _counted_weights(part: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of one of Megatron's optimizers whose gradients the norm counts, and copies that other ranks count.

    The copies are those of weights that every tp rank has, and of weights shared by several pipeline stages. Which
    weights have gradients does not change between steps.
    """
    if hasattr(part, "get_grads_for_grad_norm"):  # from megatron-core 0.19 on
        gradients: list[Tensor] = part.get_grads_for_grad_norm()
    else:
        gradients = part.get_main_grads_for_grad_norm()
    counted_ids = {id(gradient) for gradient in gradients}
    counted = []
    copies = []
    for weight in part.get_parameters():
        if id(weight.grad) in counted_ids:
            counted.append(weight)
        else:
            copies.append(weight)
    return counted, copies


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _zero_or_nan(value: Tensor) -> Tensor:
    """0 if ``value`` is finite, NaN if it is not; does not wait for the device."""
    return 0.0 * value
