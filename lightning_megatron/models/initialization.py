"""Which random weights does a new model start from? The same ones on every layout, from one seed.

Each weight is drawn whole, from a generator seeded with the run's seed and the weight's global name, and every rank
keeps its slice. So tp, pp, vpp and dp change nothing: a run can be compared with one rank from its first step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_initialization import t5_scale

_VOCAB_ROWS = ("word_embeddings.weight", "output_layer.weight")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def initialize_weights(
    chunks: Iterable[torch.nn.Module], model: ModelConfig, seed: int, only: Collection[str] | None = None
) -> None:
    """Fill the matrices with normal numbers and the biases with zeros; norms keep their ones.

    Args:
        chunks: This rank's unwrapped model chunks.
        model: The description that they were built from.
        seed: The run's seed.
        only: Megatron's keys of the weights to fill, those that no file had; None for all.
    """
    for chunk in chunks:
        state = chunk.sharded_state_dict()  # type: ignore[operator]
        apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor) and (only is None or shard.key in only):
                _fill(shard, model, seed)


def _fill(shard: ShardedTensor, model: ModelConfig, seed: int) -> None:
    layer_axes = shard.prepend_axis_num
    global_shape = list(shard.global_shape)[layer_axes:]
    if len(global_shape) < 2:
        if shard.key.endswith("bias"):
            shard.data.zero_()
        elif model.architecture == "t5":
            shard.data.fill_(model.init_method_std)  # initializer_factor scales norms, too
        return
    layer = tuple(shard.global_offset)[:layer_axes]
    if shard.key.endswith(_VOCAB_ROWS):
        # Drawn without its padding, which depends on tp.
        global_shape[0] = model.vocab_size
    std = model.init_method_std
    if model.scaled_residual_init and shard.key.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.num_layers)
    generator = torch.Generator(device=shard.data.device).manual_seed(_seed_of(shard.key, layer, seed))
    whole = torch.empty(global_shape, dtype=torch.float32, device=shard.data.device)
    whole.normal_(0.0, std, generator=generator)
    if model.architecture == "t5":
        whole *= torch.as_tensor(t5_scale(shard.key, model), device=whole.device)
    _copy_slice(whole, shard, layer_axes)


def _copy_slice(whole: torch.Tensor, shard: ShardedTensor, layer_axes: int) -> None:
    """Copy this rank's part of ``whole``; rows past its end are vocabulary padding and become zero."""
    shard.data.zero_()
    offsets = tuple(shard.global_offset)[layer_axes:]
    source, target = [], []
    for offset, length, limit in zip(offsets, shard.local_shape, whole.shape, strict=True):
        real = max(0, min(length, limit - offset))
        source.append(slice(offset, offset + real))
        target.append(slice(0, real))
    shard.data[tuple(target)].copy_(whole[tuple(source)])


def _seed_of(key: str, layer: tuple[int, ...], seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{key}/{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
