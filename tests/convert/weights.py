"""Full tensors of a checkpoint of any format under Megatron-Core's names, read through a live model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_megatron.convert.convert import build_on_cpu, live_engine
from lightning_megatron.convert.formats import open_source
from lightning_megatron.convert.shards import Key, shards_of
from lightning_megatron.convert.source import ModelSource
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.engine.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """An opened checkpoint and its tensors."""

    source: ModelSource
    tensors: dict[Key, torch.Tensor]
    """In their stored dtypes, without vocabulary padding."""


def weights_of(path: Path, config: Path | None = None) -> Weights:
    """Load the checkpoint at ``path`` into a model on one process."""
    source = open_source(path, config)
    with live_engine(ParallelConfig()):
        chunks = build_on_cpu(source.model, ParallelConfig())
        loading = WeightLoader(chunks, source.model, source.parts)
        loading.fill(as_stored=True)
        parts: dict[Key, list[torch.Tensor]] = {}
        for shard in shards_of(chunks, source.model):
            if shard.region.key not in loading.missing:
                parts.setdefault(shard.region.key, []).append(shard.data[: shard.region.shape[0]])
    return Weights(
        source=source,
        tensors={key: torch.cat(shards) for key, shards in parts.items()},
    )


def assert_same_weights(actual: Weights, expected: Weights) -> None:
    """Assert equal tensor names, shapes and values; values are compared in the dtype of ``actual``."""
    assert actual.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[key], tensor.to(actual.tensors[key].dtype)), key
