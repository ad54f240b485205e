"""``WeightLoader``: copies the weights of any ``Source`` into a live model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.convert.progress import weights_progress
from lightning_megatron.convert.shards import (
    Key,
    all_gather,
    key_of,
    sharded_parameters,
    shards_of,
    sorted_keys,
)
from lightning_megatron.convert.source import Source
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig


class WeightLoader:
    """Load weights from a checkpoint into a live model. Constructor and methods are collective over the world.

    Args:
        chunks: This rank's model chunks.
        model: Config that the chunks were built from.
        sources: Checkpoints of any format that together hold the model's tensors, opened on every rank.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or is not of this model.
    """

    def __init__(
        self, chunks: Iterable[Any], model: ModelConfig, sources: Sequence[Source]
    ) -> None:
        # The engine's import takes seconds.
        from lightning_megatron.engine.collectives import raise_on_all_ranks

        self._chunks = list(chunks)
        self._model = model
        shapes: dict[Key, tuple[int, ...]] = {}
        regions = [shard.region for shard in shards_of(self._chunks, model)]
        for part in all_gather({region.key: region.shape for region in regions}):
            shapes |= part
        keys = sorted_keys(shapes, model)

        self._found: dict[Key, tuple[Source, torch.dtype]] = {}
        # The first rank compares tied tensors.
        with raise_on_all_ranks():
            for source in sources:
                expected = {key: shapes[key] for key in keys if source.holds(key)}
                for key, dtype in source.match(model, expected).items():
                    self._found[key] = (source, dtype)
        self.missing = frozenset(shapes) - frozenset(self._found)
        """Tensors of the model that no source has (those of a head, or adapters); ``fill`` leaves them unchanged."""

    @torch.no_grad()
    def fill(
        self,
        *,
        as_stored: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy the checkpoint's values into this rank's weights; vocabulary padding becomes zero.

        Args:
            as_stored: Convert each weight to its stored dtype; False: keep the dtypes of the chunks.
            dtype: With ``as_stored``: convert each weight to this dtype instead.

        Raises:
            CheckpointError: On every rank, if a file is damaged or a finite value overflows ``dtype``.
        """
        # The engine's import takes seconds.
        from lightning_megatron.engine.collectives import raise_on_all_ranks

        if as_stored:
            for key, tensor in self.filled():
                tensor.data = torch.empty_like(
                    tensor,
                    dtype=dtype or self._found[key][1],
                )
        shards = [
            shard
            for shard in shards_of(self._chunks, self._model)
            if shard.region.key in self._found
        ]
        num_bytes = sum(shard.data.nbytes for shard in shards)
        with weights_progress("loading weights", num_bytes) as bar, raise_on_all_ranks():
            for shard in shards:
                region = shard.region.unpadded
                source, _ = self._found[region.key]
                values = source.read(region)
                num_rows = region.size[0]
                target = shard.data[:num_rows]
                shard.data[num_rows:] = 0
                target.copy_(values)
                if dtype is not None:
                    check_overflow(region.key, values, target)
                bar.update(shard.data.nbytes)

    def filled(self) -> list[tuple[Key, Tensor]]:
        """This rank's parameters that ``fill`` writes, each after the key of its (first) tensor in the checkpoint."""
        filled = []
        for tensor, parts in sharded_parameters(self._chunks):
            key = key_of(parts[0])
            if key in self._found:
                filled.append((key, tensor))
        return filled


def check_overflow(
    name: object,
    values: Tensor,
    rounded: Tensor,
) -> None:
    """Raise if a finite value of ``values`` is infinite in ``rounded``."""
    # Counting costs several times as much as rounding, and hardly any weight has infinite values.
    if not rounded.isinf().any():
        return
    if rounded.isinf().sum() <= values.isinf().sum():
        return
    dtype = str(rounded.dtype).removeprefix("torch.")
    limit = torch.finfo(rounded.dtype).max
    largest = values[values.isfinite()].abs().max().item()
    raise CheckpointError(
        f"{name}: expected values up to {limit:.4g} ({dtype}), got {largest:.4g}; keep the dtype, or use bf16 or fp32"
    )
