"""Where are the keys and values of the tokens so far, while text is generated? In the core attention of each layer.

Megatron-Core's ``StaticInferenceContext`` (megatron-core 0.16.1, inference/contexts) keeps them one level higher, in
``Attention``, where it knows one position for all rows of a batch, rotates queries and keys by it, and refuses virtual
pipeline stages. Below the rotation nothing has to be known but the order in which tokens came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lightning_megatron.engine.slots.static_cache import TokenStep


class KeyValueCache:
    """Keys and values of one layer on one rank, in the dtype in which they are computed."""

    step: TokenStep | None = None
    """Set while single tokens are read whose place only the device knows (``static_cache.py``)."""

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
        if self._keys is None or self._values is None:
            rows, groups, _, width = key.shape
            self._keys = key.new_empty(rows, groups, self.capacity, width)
            self._values = value.new_empty(rows, groups, self.capacity, width)
        first, self.length = self.length, self.length + key.shape[2]
        assert self.length <= self.capacity, f"{self.length} tokens do not fit into {self.capacity}"
        self._keys[:, :, first : self.length] = key
        self._values[:, :, first : self.length] = value
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; there may be more rows than before, or fewer.

        Args:
            rows: [b], int64.
        """
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, rows)
            self._values = self._values.index_select(0, rows)
