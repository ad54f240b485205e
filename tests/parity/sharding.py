"""The tensors of the whole model, of which every rank holds shards: taken apart on ranks, put together here.

The places of shards come from ``sharded_state_dict``, by which Megatron writes checkpoints that any layout can load.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.models import VOCAB_SIZE

Tensors = dict[str, torch.Tensor]
"""Whole tensors, fp32, by Megatron's checkpoint names; the layers are stacked along the first axis."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of one tensor of the whole model."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    data: torch.Tensor


def full_tensors(shards_of_ranks: list[list[Shard]], copies_rtol: float = 0.0) -> Tensors:
    """Put the tensors together, without the rows past the vocabulary, whose number depends on the layout.

    Args:
        shards_of_ranks: What each rank's ``shards`` returned.
        copies_rtol: How far ranks that hold the same part may differ; 0 where kernels add in a fixed order.
    """
    tensors: Tensors = {}
    for shard in (shard for shards in shards_of_ranks for shard in shards):
        tensor = tensors.setdefault(shard.key, torch.full(shard.shape, torch.nan))
        place = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.data.shape, strict=True))
        known = ~tensor[place].isnan()
        limit = copies_rtol * shard.data.abs().max()
        assert ((shard.data - tensor[place])[known].abs() <= limit).all(), f"ranks hold different copies of {shard.key}"
        tensor[place] = shard.data
    for key, tensor in tensors.items():
        assert not tensor.isnan().any(), f"no rank holds all of {key}"
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert (tensor[VOCAB_SIZE:] == 0).all(), f"padding rows of {key} are not zero"
            tensors[key] = tensor[:VOCAB_SIZE]
    return tensors


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def shards(module: Any) -> list[Shard]:
    """This rank's parts of the model's tensors, copied to the CPU in fp32."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from lightning_megatron.engine.wrap import unwrap

    found = []
    with module.megatron.engine():
        for chunk in module.model_chunks:
            state = unwrap(chunk).sharded_state_dict()
            apply_factories(state)
            found += [_shard(part) for part in nested_values(state) if isinstance(part, ShardedTensor)]
    return found


def _shard(part: Any) -> Shard:
    layer_axes = (1,) * part.prepend_axis_num
    return Shard(
        key=part.key,
        shape=tuple(part.global_shape),
        offset=tuple(part.global_offset),
        data=part.data.detach().float().cpu().clone().reshape(layer_axes + tuple(part.local_shape)),
    )


@contextmanager
def gradients_in_place_of_weights(module: Any) -> Iterator[None]:
    """While active, each trained parameter's data is its reduced gradient: whatever reads weights reads gradients."""
    _complete_gradients(module)
    parameters = [p for chunk in module.model_chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        # Of the weights' dtype: another one would make torch forget the hook that reduces the gradient from then on.
        parameter.data = parameter.main_grad.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def _complete_gradients(module: Any) -> None:
    """Under the distributed optimizer each rank of dp x cp has reduced only its part of each bucket: exchange them."""
    import torch.distributed as dist

    if not module.megatron.distributed_optimizer:
        return
    buffers = [b for chunk in module.model_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for group, bucket in ((buffer.data_parallel_group, bucket) for buffer in buffers for bucket in buffer.buckets):
        part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        bucket.grad_data.copy_(torch.cat(parts))
