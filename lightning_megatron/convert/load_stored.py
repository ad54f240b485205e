"""How do the weights of any checkpoint get into a model that is split over ranks? Each rank reads its own rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_megatron.convert.load import progress_bar
from lightning_megatron.convert.pieces import Shard, shards_of
from lightning_megatron.convert.reading import read_box
from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.stored.base import Key, StoredModel
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.errors import CheckpointError


@torch.no_grad()
def load_stored(chunks: Iterable[Any], stored: StoredModel) -> None:
    """Fill this rank's model chunks with the weights of ``stored``, in the chunks' dtype. Every rank must call.

    Args:
        chunks: This rank's model chunks, built from ``stored.model``.
        stored: A checkpoint of any format.

    Raises:
        CheckpointError: If it lacks weights, has them in other shapes, or is damaged; on all ranks alike.
    """
    rules = rules_of(stored.model)
    shards = [
        (Key(rules[shard.place.rule].megatron, shard.place.layer), shard)
        for shard in shards_of(chunks, rules, stored.model)
    ]
    on_all_ranks_alike(lambda: _check(shards, stored))
    on_all_ranks_alike(lambda: _fill(shards, stored))


def _check(shards: list[tuple[Key, Shard]], stored: StoredModel) -> None:
    for key, shard in shards:
        spec = stored.tensors.get(key)
        if spec is None or spec.shape != shard.place.shape:
            layer = "" if key.layer is None else f" of layer {key.layer}"
            found = "is missing" if spec is None else f"has the shape {list(spec.shape)}"
            raise CheckpointError(
                f"{stored.path}: {key.name}{layer} {found}, and the model needs it with {list(shard.place.shape)}"
            )


def _fill(shards: list[tuple[Key, Shard]], stored: StoredModel) -> None:
    total = sum(shard.data.numel() * shard.data.element_size() for _, shard in shards)
    with progress_bar("loading weights", total) as bar:
        for key, shard in shards:
            read_box(stored, key, shard.place.offset, shard.data)
            bar.update(shard.data.numel() * shard.data.element_size())
