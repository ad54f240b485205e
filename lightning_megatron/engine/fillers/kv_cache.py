"""Caches of keys and values in the core attention of each layer, while text is generated.

Megatron-Core's ``StaticInferenceContext`` (megatron-core 0.16.1, inference/contexts) keeps them one level higher, in
``Attention``, where it knows one position for all rows of a batch, rotates queries and keys by it, and refuses virtual
pipeline stages. Below the rotation nothing has to be known but the order in which tokens came.

Static caches never change their size: every pass that reads one token per row then has the same shapes, whatever the
texts' length, and nothing of it depends on numbers of the host, so that a GPU can replay it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lightning_megatron.engine.fillers.attention import SMALLEST_PART
from lightning_megatron.engine.fillers.masks import Alibi, added_scores, key_biases

ALIGNMENT = 8
"""Slots come in multiples of it: the memory-efficient kernel copies masks whose rows do not."""

MANY_SLOTS = 512
"""Above it slots come in multiples of ``attention.SMALLEST_PART``, so that they can be cut into parts."""


def slots_for(tokens: int) -> int:
    """How many slots a cache for so many tokens has."""
    alignment = ALIGNMENT if tokens <= MANY_SLOTS else SMALLEST_PART
    return -(-tokens // alignment) * alignment


class KeyValueCache:
    """Keys and values of one layer on one rank, in the dtype in which they are computed."""

    step: TokenStep | None = None
    """Set while single tokens are read whose place only the device knows."""

    def __init__(self, capacity: int) -> None:
        """Memory is taken when the first keys come.

        Args:
            capacity: How many tokens a row may have.
        """
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next tokens and return all: [b, ng, length, hn] each, without copying them.

        Args:
            key: [b, ng, s, hn].
            value: [b, ng, s, hn].
        """
        kept_keys, kept_values = self._kept(key, value)
        first, self.length = self.length, self.length + key.shape[2]
        assert self.length <= self.capacity, f"{self.length} tokens do not fit into {self.capacity}"
        kept_keys[:, :, first : self.length] = key
        kept_values[:, :, first : self.length] = value
        return kept_keys[:, :, : self.length], kept_values[:, :, : self.length]

    def _kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All slots, made when first asked for, [b, ng, capacity, hn] each."""
        if self._keys is None or self._values is None:
            # Not empty: what stands in a slot that nobody sees is multiplied by 0, and NaN would stay NaN.
            rows, groups, _, width = key.shape
            self._keys = key.new_zeros(rows, groups, self.capacity, width)
            self._values = value.new_zeros(rows, groups, self.capacity, width)
        return self._keys, self._values

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; there may be more rows than before, or fewer.

        Args:
            rows: [b], int64.
        """
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows)
            self._values = self._values.index_select(0, rows)


class SourceCache(KeyValueCache):
    """Keys and values of the encoder's output in one layer of a decoder; nothing comes to them later."""

    def __init__(self) -> None:
        """Memory is taken when the keys come."""
        super().__init__(0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the whole source, or return them if these are none; as ``KeyValueCache.append``."""
        if self.length == 0:
            self.capacity = key.shape[2]
        return super().append(key, value)

    def select(self, rows: Tensor) -> None:
        """Copy rows if there are more or fewer of them now; else row i and row ``rows[i]`` have the same prompt."""
        if self._keys is not None and len(rows) != len(self._keys):
            super().select(rows)


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
        if self.step is None:
            return super().append(key, value)
        kept = self._kept(key, value)
        for each, new in zip(kept, (key, value), strict=True):
            each.index_copy_(2, self.step.place, new)
        return kept[0][:, :, : self.step.num_keys], kept[1][:, :, : self.step.num_keys]

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; as many rows as before stay where they are in memory."""
        if self._keys is None or self._values is None or len(rows) != len(self._keys):
            super().select(rows)
            return
        num_keys = self.capacity if self.step is None else self.step.num_keys
        for kept in (self._keys[:, :, :num_keys], self._values[:, :, :num_keys]):
            kept.copy_(kept.index_select(0, rows))
