"""In which order are the rows of one rank's queries, keys and values, and where do Megatron-Core's rows stand?

| checkpoint version | rows of a shard | written by |
|---|---|---|
| 0 | [3, heads, width] | Megatron-LM v1, NVIDIA's published models |
| 1.0 | [heads, width, 3] | Megatron-LM of some months of 2020 |
| 2.0, 3.0 | [heads, 3, width] | since; with query groups [groups, heads of a group + 2, width] |

The last one is Megatron-Core's. Of cross-attention's keys and values the same holds with 2 instead of 3.
"""

from __future__ import annotations

import torch

from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

VERSIONS = (0.0, 1.0, 2.0, 3.0)


def check_version(version: float, model: ModelConfig, tp: int) -> None:
    """Raise if it is not known how the rows of ``model`` are ordered on ``tp`` ranks.

    Raises:
        CheckpointError: If the version is another one, grouped queries stand in one that had none, or a rank has a
            part of a head.
    """
    if version not in VERSIONS:
        raise CheckpointError(
            f"checkpoint_version={version:g} is unknown; known are {', '.join(f'{each:g}' for each in VERSIONS)}"
        )
    if version < 2.0 and model.num_query_groups != model.num_attention_heads:
        raise CheckpointError(
            f"checkpoint_version={version:g} has no query groups, and the model has; correct its description"
        )
    if version < 2.0 and model.num_attention_heads % tp != 0:
        raise CheckpointError(
            f"num_attention_heads: expected a multiple of the checkpoint's tp={tp}, got {model.num_attention_heads}; "
            "give the config.json that belongs to it with --config"
        )


def shard_order(version: float, kinds: int, heads: int, width: int) -> torch.Tensor | None:
    """Which row of a shard is Megatron-Core's i-th row of it.

    Args:
        version: Of the checkpoint.
        kinds: 3 for queries, keys and values; 2 for keys and values.
        heads: Of this shard.
        width: Of a head.

    Returns:
        [kinds * heads * width], int64; None if they are the same.
    """
    if version >= 2.0:
        return None
    rows = torch.arange(kinds * heads * width)
    if version == 1.0:
        return rows.view(heads, width, kinds).permute(0, 2, 1).flatten()
    return rows.view(kinds, heads, width).transpose(0, 1).flatten()
