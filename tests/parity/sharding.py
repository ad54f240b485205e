"""Full tensors of a model from the shards of all ranks.

Offsets of shards come from ``sharded_state_dict``, with which Megatron writes checkpoints that any layout can load.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.models import VOCAB_SIZE

Tensors = dict[str, torch.Tensor]
"""Full fp32 tensors by Megatron checkpoint name; layers are stacked along the first axis."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's shard of one tensor."""

    key: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    offset: tuple[int, ...]
    data: torch.Tensor


def full_tensors(shards_of_ranks: list[list[Shard]], copies_rtol: float = 0.0) -> Tensors:
    """Assemble full tensors, without vocabulary padding, whose size depends on the layout.

    Args:
        shards_of_ranks: Result of ``shards`` on each rank.
        copies_rtol: Relative tolerance between ranks that hold the same shard; 0 where kernels add in a fixed order.
    """
    tensors: Tensors = {}
    for shard in (shard for shards in shards_of_ranks for shard in shards):
        tensor = tensors.setdefault(shard.key, torch.full(shard.shape, torch.nan))
        region = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.data.shape, strict=True))
        filled = ~tensor[region].isnan()
        limit = copies_rtol * shard.data.abs().max()
        assert ((shard.data - tensor[region])[filled].abs() <= limit).all(), (
            f"ranks differ in {shard.key}"
        )
        tensor[region] = shard.data
    for key, tensor in tensors.items():
        assert not tensor.isnan().any(), f"no rank holds all of {key}"
        if key.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert (tensor[VOCAB_SIZE:] == 0).all(), f"padding rows of {key} are not zero"
            tensors[key] = tensor[:VOCAB_SIZE]
    return tensors


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def shards(module: Any) -> list[Shard]:
    """Return this rank's shards of the model, copied to the CPU in fp32."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from lightning_megatron.engine.wrap import unwrap

    result = []
    with module.megatron.engine():
        for chunk in module.model_chunks:
            state = unwrap(chunk).sharded_state_dict()
            apply_factories(state)
            result += [
                _shard(part) for part in nested_values(state) if isinstance(part, ShardedTensor)
            ]
    return result


def _shard(part: Any) -> Shard:
    layer_axes = (1,) * part.prepend_axis_num
    return Shard(
        key=part.key,
        shape=tuple(part.global_shape),
        offset=tuple(part.global_offset),
        data=part.data.detach().float().cpu().clone().reshape(layer_axes + tuple(part.local_shape)),
    )


@contextmanager
def gradients_as_weights(module: Any) -> Iterator[None]:
    """While active, the data of each trainable parameter is its reduced gradient, for ``shards`` to read."""
    _complete_gradients(module)
    parameters = [p for chunk in module.model_chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.data for p in parameters]
    for parameter in parameters:
        # In the dtype of the weights: with another one torch would drop the hook that reduces the gradient.
        parameter.data = parameter.main_grad.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def _complete_gradients(module: Any) -> None:
    """All-gather buckets over dp x cp: with the distributed optimizer each rank has reduced only its own shard."""
    import torch.distributed as dist

    if not module.megatron.distributed_optimizer:
        return
    buffers = [
        b for chunk in module.model_chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    for group, bucket in (
        (buffer.data_parallel_group, bucket) for buffer in buffers for bucket in buffer.buckets
    ):
        part = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part, group=group)
        bucket.grad_data.copy_(torch.cat(parts))
