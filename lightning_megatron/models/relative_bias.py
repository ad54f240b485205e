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

from lightning_megatron.engine.fillers.masks import MASKED_SCORE

_LENGTHS_AT_ONCE = 256
"""While text grows the rows of so many lengths are computed at once."""
_ALIGNMENT = 16
"""Rows of scores start at multiples of this many numbers: the memory-efficient kernel would copy them otherwise."""


def relative_buckets(
    length: int, *, bidirectional: bool, num_buckets: int, max_distance: int, num_queries: int | None = None
) -> Tensor:
    """The row of the table for each pair of a query and a key: [num_queries, length], int64, on the CPU.

    The queries are the last ones of the sequence; None for all.

    Half of the rows stand for one distance each, the others for ranges that grow in geometric progression up to
    ``max_distance``; in both directions each has half of all rows.

    Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1; the rounding is that of Hugging Face's T5.
    """
    position = torch.arange(length)
    distance = position[None, :] - position[length - (length if num_queries is None else num_queries) :, None]
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
        self._last_buckets: Tensor | None = None

    def forward(self, length: int, attention_mask: Tensor | None, num_queries: int | None = None) -> Tensor:
        """What is added to the scores, hidden keys included; in one direction, keys to the right are hidden.

        Args:
            length: Tokens s of the sequence.
            attention_mask: [b, s], 0 where a key is padding; None if none is.
            num_queries: How many of the last tokens are queries (the keys before them are cached); None for all.

        Returns:
            [b or 1, heads/tp, queries, s] in the weight's dtype. It is made once for all layers of a chunk, which then
            keep one and the same tensor for their backward passes.
        """
        queries = length if num_queries is None else num_queries
        buckets = self._buckets_for(length) if queries == length else self._last_buckets_for(length, queries)
        scores = F.embedding(buckets, self.weight).permute(2, 0, 1)[None].contiguous()
        hidden = None
        if not self.bidirectional and queries > 1:
            hidden = torch.ones_like(buckets, dtype=torch.bool).triu(1 + length - queries)[None, None]
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
            self._buckets = self._computed_buckets(rounded, rounded)[:length].to(self.weight.device)
        return self._buckets

    def _last_buckets_for(self, length: int, num_queries: int) -> Tensor:
        """[num_queries, s]: the end of a longer sequence, whose last queries see their last keys at the same distances.

        So the next lengths need neither the host nor another copy to the device.
        """
        last = self._last_buckets
        if last is None or last.shape[0] != num_queries or last.shape[1] < length:
            rounded = -(-length // _LENGTHS_AT_ONCE) * _LENGTHS_AT_ONCE
            last = self._computed_buckets(rounded, num_queries).to(self.weight.device)
            self._last_buckets = last
        return last[:, last.shape[1] - length :]

    def _computed_buckets(self, length: int, num_queries: int) -> Tensor:
        return relative_buckets(
            length,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            num_queries=num_queries,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The table with its columns split over tp, under Megatron-Core's name for it."""
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 1}, sharded_offsets
        )
        return state
