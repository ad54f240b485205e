"""``WeightLoader``: copies the weights of any ``Source`` into a live model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

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


class WeightLoader:
    """Load weights from a checkpoint into a live model. Constructor and methods are collective over the world.

    Args:
        chunks: This rank's model chunks, built from ``source.model``.
        source: A checkpoint of any format, opened on every rank.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or is not of this model.
    """

    def __init__(self, chunks: Iterable[Any], source: Source) -> None:
        from lightning_megatron.engine.collectives import (
            call_on_all_ranks,
        )  # the engine's import takes seconds

        self._chunks, self._model = list(chunks), source.model
        shapes: dict[Key, tuple[int, ...]] = {}
        for part in all_gather(
            {s.region.key: s.region.shape for s in shards_of(self._chunks, source.model)}
        ):
            shapes |= part
        keys = sorted_keys(shapes, source.model)

        def match() -> dict[Key, tuple[Source, torch.dtype]]:
            matches = (
                (part, part.match({k: shapes[k] for k in keys if part.holds(k)}))
                for part in source.sources
            )
            return {key: (part, dtype) for part, dtypes in matches for key, dtype in dtypes.items()}

        self._found = call_on_all_ranks(match)  # the first rank compares tied tensors
        self.missing = frozenset(shapes) - frozenset(self._found)
        """Tensors of the model that ``source`` lacks (those of a head, or adapters); ``fill`` leaves them unchanged."""

    @torch.no_grad()
    def fill(self, *, as_stored: bool = False, dtype: torch.dtype | None = None) -> None:
        """Copy the checkpoint's values into this rank's weights; vocabulary padding becomes zero.

        Args:
            as_stored: Convert each weight to its stored dtype; False: keep the dtypes of the chunks.
            dtype: With ``as_stored``: convert each weight to this dtype instead.

        Raises:
            CheckpointError: On every rank, if a file is damaged or a finite value overflows ``dtype``.
        """
        from lightning_megatron.engine.collectives import call_on_all_ranks

        if as_stored:
            for key, tensor in self.filled():
                tensor.data = torch.empty_like(tensor, dtype=dtype or self._found[key][1])
        shards = [
            shard
            for shard in shards_of(self._chunks, self._model)
            if shard.region.key in self._found
        ]
        with weights_progress("loading weights", sum(shard.data.nbytes for shard in shards)) as bar:

            def fill_all() -> None:
                for shard in shards:
                    region = shard.region.unpadded
                    values, target = (
                        self._found[region.key][0].read(region),
                        shard.data[: region.size[0]],
                    )
                    shard.data[region.size[0] :] = 0
                    target.copy_(values)
                    if dtype is not None:
                        check_overflow(region.key, values, target)
                    bar.update(shard.data.nbytes)

            call_on_all_ranks(fill_all)

    def filled(self) -> list[tuple[Key, torch.Tensor]]:
        """This rank's parameters that ``fill`` writes, each after the key of its (first) tensor in the checkpoint."""
        keyed = [(key_of(parts[0]), tensor) for tensor, parts in sharded_parameters(self._chunks)]
        return [(key, tensor) for key, tensor in keyed if key in self._found]


def check_overflow(name: object, values: torch.Tensor, rounded: torch.Tensor) -> None:
    """Raise if a finite value of ``values`` is infinite in ``rounded``."""
    # Counting costs several times as much as rounding, and hardly any weight has infinite values.
    if rounded.isinf().any() and rounded.isinf().sum() > values.isinf().sum():
        raise CheckpointError(
            f"{name}: expected values up to {torch.finfo(rounded.dtype).max:.4g} ({str(rounded.dtype)[6:]}), got "
            f"{values[values.isfinite()].abs().max().item():.4g}; keep the dtype, or use bf16 or fp32"
        )
