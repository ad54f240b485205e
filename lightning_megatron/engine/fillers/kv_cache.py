"""Caches of keys and values in the core attention of each layer, while text is generated.

Megatron-Core's ``StaticInferenceContext`` (megatron-core 0.16.1, inference/contexts) keeps them one level higher, in
``Attention``, where it knows one position for all rows of a batch, rotates queries and keys by it, and refuses virtual
pipeline stages. Below the rotation nothing has to be known but the order in which tokens came.

The caches never change their size. In a ``TokenStep`` a pass that reads one token per row looks at the same slots
whatever the texts' length, and nothing of it depends on numbers of the host, so that a GPU can replay it as a CUDA
graph.
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
    """Keys and values of one layer on one rank, in the dtype in which they are computed, at addresses that stay."""

    step: TokenStep | None = None
    """Set while single tokens are read whose place only the device knows."""

    def __init__(self, slots: int) -> None:
        """Memory is taken when the first keys come.

        Args:
            slots: How many tokens a row may have.
        """
        self.length = 0
        """Tokens of a row that are there, those of steps apart."""
        self._slots = slots
        self._kept: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the next tokens and return all: [b, ng, length, hn] each, without copying them.

        In a step they go to the slot that the device knows, and all slots that the step looks at are returned.

        Args:
            key: [b, ng, s, hn]; s is 0 where nothing comes to an encoder's output.
            value: [b, ng, s, hn].
        """
        if not self._kept:
            # Not empty: what stands in a slot that nobody sees is multiplied by 0, and NaN would stay NaN.
            self._kept = [new.new_zeros(*new.shape[:2], self._slots, new.shape[3]) for new in (key, value)]
        first = self.length
        if self.step is None:
            self.length += key.shape[2]
        for kept, new in zip(self._kept, (key, value), strict=True):
            if self.step is None:
                kept[:, :, first : self.length] = new
            else:
                kept.index_copy_(2, self.step.place, new)
        keys, values = self._seen()
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; as many rows as before stay where they are in memory.

        Args:
            rows: [b], int64; there may be more rows than before, or fewer.
        """
        if len(rows) == len(self._kept[0]):
            for seen in self._seen():
                seen.copy_(seen.index_select(0, rows))
        else:
            self._kept = [kept.index_select(0, rows) for kept in self._kept]

    def _seen(self) -> list[Tensor]:
        """What a query looks at."""
        seen = self.length if self.step is None else self.step.num_keys
        return [kept[:, :, :seen] for kept in self._kept]


class TokenStep:
    """Where the one token of each row stands, and what is in the slots of the caches, for all layers of a pass."""

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
        self._made: dict[Hashable, Tensor] = {}

    def scores(self, window: int | None, alibi: Alibi | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, made once in a pass for all layers of a kind: [b, np or 1, 1, slots].

        Args:
            window: How many tokens back, itself included, a token sees; None for all.
            alibi: Whose linear biases are added; None for none.
            dtype: Of the queries.
        """
        key = (window, alibi, dtype)
        if key not in self._made:
            slots = torch.arange(self.num_keys, device=self.place.device)
            hidden = ~self._is_token | (slots > self.place)
            if window is not None:
                hidden = hidden | (slots <= self.place - window)
            bias = None
            if alibi is not None:
                biases = key_biases(alibi, self._is_token, self.num_keys, hidden.device)
                # Relative to the query, whose key is at ``place``: near keys get small numbers, as in ``relative``.
                bias = (biases - biases.index_select(-1, self.place))[:, :, None]
            self._made[key] = added_scores(hidden[:, None, None], bias, dtype)
        return self._made[key]
