"""The whole tensors of a checkpoint of any format, by Megatron-Core's names, as the live model holds them."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_megatron.convert.contents import open_source
from lightning_megatron.convert.convert import build_on_cpu, live_engine
from lightning_megatron.convert.shards import Key, Source, WeightLoader, shards_of
from lightning_megatron.engine.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A checkpoint that was opened and loaded."""

    source: Source
    tensors: dict[Key, torch.Tensor]
    """In the dtypes that they are stored in, without rows that pad the vocabulary."""


def weights_of(path: Path, config: Path | None = None) -> Weights:
    """Load the checkpoint at ``path`` into a live model of one process."""
    source = open_source(path, config)
    with live_engine(ParallelConfig()):
        chunks = build_on_cpu(source.model, ParallelConfig())
        loading = WeightLoader(chunks, source)
        loading.fill(as_stored=True)
        parts: dict[Key, list[torch.Tensor]] = {}
        for shard in shards_of(chunks, source.model):
            if shard.region.key not in loading.missing:
                parts.setdefault(shard.region.key, []).append(shard.data[: shard.region.shape[0]])
    return Weights(source=source, tensors={key: torch.cat(each) for key, each in parts.items()})


def assert_same_weights(found: Weights, expected: Weights) -> None:
    """All tensors of the same names, shapes and numbers."""
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[key], tensor.to(found.tensors[key].dtype)), key
