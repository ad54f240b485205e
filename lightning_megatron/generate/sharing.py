"""How do the copies of a model share the rows of one call? They are dealt and gathered in order."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError


def rows_of_copies(topology: Topology, rows: int) -> list[int]:
    """How many rows each copy of the model takes."""
    dp = topology.dp
    return [rows * (rank + 1) // dp - rows * rank // dp for rank in range(dp)]


def own_rows(topology: Topology, counts: list[int]) -> slice:
    """Which rows are this copy's."""
    first = sum(counts[: topology.dp_rank])
    return slice(first, first + counts[topology.dp_rank])


def gathered(topology: Topology, own: Tensor, counts: list[int]) -> Tensor:
    """The rows of all copies in order, on every rank; every rank must call.

    Args:
        topology: This rank's place.
        own: [counts[dp_rank], ...]; all but the number of rows is the same everywhere.
        counts: Rows of each copy.
    """
    if len(counts) == 1:
        return own
    # Collectives want equal shapes: short copies send rows that are cut off again.
    mine = own.new_zeros(max(counts), *own.shape[1:])
    mine[: len(own)] = own
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=topology.dp_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def check_agreement(settings: object, *tensors: Tensor | None) -> None:
    """Every rank must have been asked for the same, or they would wait for each other forever; every rank must call.

    Args:
        settings: Compared by what it looks like as text.
        tensors: On the host.

    Raises:
        ConfigError: On all ranks, if the prompts or the options differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr((settings, [None if t is None else t.shape for t in tensors])).encode())
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.long().contiguous().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ConfigError(
            f"rank {different[0]} asks with other prompts or options than rank 0; give every rank the same (they share "
            "the rows)"
        )
