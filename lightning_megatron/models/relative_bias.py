"""How do relative positions enter T5's attention? A learned table of scores by distance, split over tp by heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.slots.attention_masks import MASKED_SCORE

_ALIGNMENT = 16
"""Rows of scores start at multiples of this many numbers: the memory-efficient kernel would copy them otherwise."""


def relative_buckets(length: int, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """The row of the table for each pair of a query and a key: [length, length], int64, on the CPU.

    Half of the rows stand for one distance each, the others for ranges that grow in geometric progression up to
    ``max_distance``; in both directions each has half of all rows.

    Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1; the rounding is that of Hugging Face's T5.
    """
    position = torch.arange(length)
    distance = position[None, :] - position[:, None]
    rows, first = num_buckets, torch.zeros_like(distance)
    if bidirectional:
        rows //= 2
        first = (distance > 0) * rows
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = rows // 2
    # In float32, in this order of operations: another rounding would put some distances into the next row.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (rows - exact)
    far = (exact + far.long()).clamp(max=rows - 1)
    return first + torch.where(distance < exact, distance, far)


class RelativeBias(MegatronModule):
    """One stack's table, the columns of this rank's heads: weight [num_buckets, heads/tp].

    Split, not copied: its gradient needs no sum over tp, and the gradient norm counts each number once.
    """

    def __init__(self, config: TransformerConfig, num_buckets: int, max_distance: int, *, bidirectional: bool) -> None:
        """Create the table.

        Args:
            config: The engine's config.
            num_buckets: Rows.
            max_distance: Distances from here on share one row.
            bidirectional: Whether keys to the right of the query have rows of their own (in encoders).
        """
        super().__init__(config=config)
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.empty(num_buckets, heads, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        set_tensor_model_parallel_attributes(self.weight, True, 1, 1)
        self._buckets: Tensor | None = None

    def forward(self, length: int, attention_mask: Tensor | None) -> Tensor:
        """What is added to the scores, hidden keys included; in one direction, keys to the right are hidden.

        Args:
            length: Tokens s of the sequence.
            attention_mask: [b, s], 0 where a key is padding; None if none is.

        Returns:
            [b or 1, heads/tp, s, s] in the weight's dtype. It is made once for all layers of a chunk, which then keep
            one and the same tensor for their backward passes.
        """
        buckets = self._buckets_for(length)
        scores = F.embedding(buckets, self.weight).permute(2, 0, 1)[None].contiguous()
        hidden = None if self.bidirectional else torch.ones_like(buckets, dtype=torch.bool).triu(1)[None, None]
        if attention_mask is not None:
            padding = F.pad(attention_mask == 0, (0, buckets.shape[1] - length))[:, None, None, :]
            hidden = padding if hidden is None else hidden | padding
        if hidden is not None:
            # Overwritten, not added: a large bias must not make a hidden key visible.
            scores = scores.masked_fill(hidden, MASKED_SCORE)
        return scores[..., :length]

    def _buckets_for(self, length: int) -> Tensor:
        """[s, s rounded up], so that what is cut to s columns in the end has aligned rows."""
        if self._buckets is None or self._buckets.shape[0] != length:
            rounded = -(-length // _ALIGNMENT) * _ALIGNMENT
            whole = relative_buckets(
                rounded, bidirectional=self.bidirectional, num_buckets=self.num_buckets, max_distance=self.max_distance
            )
            self._buckets = whole[:length].to(self.weight.device)
        return self._buckets

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The table with its columns split over tp, under Megatron-Core's name for it."""
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 1}, sharded_offsets
        )
        return state
