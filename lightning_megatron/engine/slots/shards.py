"""What does the distributed optimizer own of float32 weights? Leaf tensors, not nodes of an autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from torch import Tensor

from lightning_megatron.engine.patching import Patch

_Groups = tuple[list[list[Tensor]], ...]


def _with_leaf_shards(original: Callable[..., _Groups]) -> Any:
    def _build_model_and_main_param_groups(
        gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: list[dict[str, Any]], config: Any
    ) -> _Groups:
        groups = original(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        float32_shards = groups[3]
        for shards, group_range in zip(float32_shards, opt_group_ranges, strict=True):
            for index, shard in enumerate(shards):
                # The float32 shards come first among the optimizer's parameters of a group.
                shards[index] = group_range["orig_group"]["params"][index] = _leaf(shard)
        return groups

    return staticmethod(_build_model_and_main_param_groups)


def _leaf(shard: Tensor) -> Tensor:
    leaf = shard.detach()
    copy_tensor_model_parallel_attributes(leaf, shard)
    if hasattr(shard, "shared"):
        leaf.shared = shard.shared  # type: ignore[attr-defined]
    return leaf


SHARD_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.optimizer.distrib_optimizer",
        attribute="DistributedOptimizer._build_model_and_main_param_groups",
        replacement=_with_leaf_shards,
        engine="megatron-core 0.16.1",
        reason="float32 shards are views with a grad_fn: torch warns whenever the optimizer reads their .grad",
    ),
)
"""Quiet float32 training with the distributed optimizer."""
