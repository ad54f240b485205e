"""What does a token see when only the device knows its place? Keys and values in caches whose size never changes.

Every pass that reads one token per row then has the same shapes, whatever the texts' length, and nothing of it depends
on numbers of the host: a GPU can replay it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lightning_megatron.engine.fillers.attention import SMALLEST_PART
from lightning_megatron.engine.fillers.masks import Alibi, added_scores, key_biases
from lightning_megatron.engine.slots.kv_cache import KeyValueCache

ALIGNMENT = 8
"""Slots come in multiples of it: the memory-efficient kernel copies masks whose rows do not."""

MANY_SLOTS = 512
"""Above it slots come in multiples of ``split_keys.SMALLEST_PART``, so that they can be cut into parts."""


def slots_for(tokens: int) -> int:
    """How many slots a cache for so many tokens has."""
    alignment = ALIGNMENT if tokens <= MANY_SLOTS else SMALLEST_PART
    return -(-tokens // alignment) * alignment


class TokenStep:
    """Where the one token of each row stands, and what is in the slots of the caches; shared by all layers."""

    def __init__(self, place: Tensor, is_token: Tensor) -> None:
        """Point to buffers of the device, which whoever advances the texts writes to.

        Args:
            place: [1], int64, the slot of the newest token; the same in all rows.
            is_token: [b, slots], bool, False for the padding of prompts; of slots behind ``place`` it does not matter.
        """
        self.place = place
        self.num_keys = is_token.shape[1]
        """How many slots a query looks at."""
        self._is_token = is_token
        self._slots = torch.arange(self.num_keys, device=is_token.device)
        self._made: dict[Hashable, Tensor] = {}

    def forget(self) -> None:
        """End a pass: the next one makes its own scores, as those of a recorded pass belong to its graph."""
        self._made.clear()

    def scores(self, window: int | None, alibi: Alibi | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, made once in a pass for all layers of a kind: [b, np or 1, 1, slots].

        Args:
            window: How many tokens back, itself included, a token sees; None for all.
            alibi: Whose linear biases are added; None for none.
            dtype: Of the queries.
        """
        key = (window, alibi, dtype)
        if key not in self._made:
            self._made[key] = self._scores(window, alibi, dtype)
        return self._made[key]

    def _scores(self, window: int | None, alibi: Alibi | None, dtype: torch.dtype) -> Tensor:
        hidden = ~self._is_token | (self._slots > self.place)
        if window is not None:
            hidden = hidden | (self._slots <= self.place - window)
        bias = None
        if alibi is not None:
            biases = key_biases(alibi, self._is_token, self.num_keys, hidden.device)
            # Relative to the query, whose key is at ``place``: near keys get small numbers, as in ``alibi.relative``.
            bias = (biases - biases.index_select(-1, self.place))[:, :, None]
        return added_scores(hidden[:, None, None], bias, dtype)


class StaticCache(KeyValueCache):
    """Keys and values of one layer at addresses that stay: written behind each other by a prompt, then slot by slot."""

    def __init__(self, capacity: int) -> None:
        """Memory is taken when the first keys come.

        Args:
            capacity: How many tokens a row may have; there are ``slots_for`` them.
        """
        super().__init__(slots_for(capacity))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next tokens; as ``KeyValueCache.append``.

        In a step they go to the slot that the device knows, and all slots that the step looks at are returned.
        """
        if self._keys is None or self._values is None:
            # Not empty: what stands in a slot that nobody sees is multiplied by 0, and NaN would stay NaN.
            rows, groups, _, width = key.shape
            self._keys = key.new_zeros(rows, groups, self.capacity, width)
            self._values = value.new_zeros(rows, groups, self.capacity, width)
        if self.step is None:
            return super().append(key, value)
        self._keys.index_copy_(2, self.step.place, key)
        self._values.index_copy_(2, self.step.place, value)
        return self._keys[:, :, : self.step.num_keys], self._values[:, :, : self.step.num_keys]

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; as many rows as before stay where they are in memory."""
        if self._keys is None or self._values is None or len(rows) != len(self._keys):
            super().select(rows)
            return
        num_keys = self.capacity if self.step is None else self.step.num_keys
        for kept in (self._keys[:, :, :num_keys], self._values[:, :, :num_keys]):
            kept.copy_(kept.index_select(0, rows))
