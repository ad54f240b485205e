"""Cache of keys and values, of latents of them, or of the state of linear attention, in generation.

Megatron-Core's StaticInferenceContext (megatron-core 0.16.1, inference/contexts) caches one level higher, in
Attention, with one position for all rows of a batch by which it rotates queries and keys, and refuses virtual
pipeline stages. A cache of rotated keys needs no positions, only the order of tokens.

Caches have a fixed size. In a TokenStep a pass over one token per row attends to the same slots whatever the length
of the sequences, and depends on no value of the host, so that a GPU can replay it as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.ops import masks
from lightning_megatron.engine.ops.masks import Alibi
from lightning_megatron.engine.ops.split_k import SPLIT_SIZE

SLOT_ALIGNMENT = 8
"""Slots are a multiple of it: the memory-efficient kernel copies masks whose rows are not."""

MAX_UNSPLIT_SLOTS = 512
"""Above it slots are a multiple of ``SPLIT_SIZE``, for split-K."""


def slots_for(tokens: int) -> int:
    """Number of slots of a cache for ``tokens`` tokens per row."""
    alignment = SLOT_ALIGNMENT if tokens <= MAX_UNSPLIT_SLOTS else SPLIT_SIZE
    return -(-tokens // alignment) * alignment


class KeyValueCache:
    """Keys and values of one layer on one rank, in the dtype in which they are computed, at fixed addresses."""

    step: TokenStep | None = None
    """Set for steps of one token whose slot only the device knows."""

    def __init__(self, slots: int) -> None:
        """Create an empty cache, which allocates memory for the first keys.

        Args:
            slots: Maximum number of tokens of a row.
        """
        self.length = 0
        """Tokens of a row in the cache, without those of a ``TokenStep``."""
        self._slots = slots
        self._buffers: list[Tensor] = []

    def append(
        self,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Append the next tokens and return views of all keys and values: [b, ng, length, hn] each.

        In a ``TokenStep`` they are written to its slot, and all slots that the step attends to are returned.

        Args:
            key: [b, ng, s, hn]; s is 0 if nothing is added to an encoder's output.
            value: [b, ng, s, hn].
        """
        keys, values = self._write(key, value)
        return keys, values

    def _write(self, *tensors: Tensor) -> list[Tensor]:
        """Write the next tokens to a buffer for each tensor, and return views of what a query attends to."""
        if not self._buffers:
            # Not torch.empty: unused slots are multiplied by 0, and NaN would stay NaN.
            self._buffers = [self._new_buffer(new) for new in tensors]
        first = self.length
        if self.step is None:
            self.length += tensors[0].shape[2]
        for buffer, new in zip(self._buffers, tensors, strict=True):
            if self.step is None:
                buffer[:, :, first : self.length] = new
            else:
                buffer.index_copy_(2, self.step.slot, new)
        return self._visible()

    def _new_buffer(self, new: Tensor) -> Tensor:
        rows, groups, _, width = new.shape
        return new.new_zeros(rows, groups, self._slots, width)

    def select(self, rows: Tensor) -> None:
        """Replace row i by row ``rows[i]``; in place if the number of rows stays the same.

        Args:
            rows: [b], int64; there may be more rows than before, or fewer.
        """
        if len(rows) == len(self._buffers[0]):
            for visible in self._visible():
                visible.copy_(visible.index_select(0, rows))
        else:
            self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]

    def _visible(self) -> list[Tensor]:
        """Parts of the buffers that a query attends to."""
        length = self.length if self.step is None else self.step.num_keys
        return [buffer[:, :, :length] for buffer in self._buffers]


class LatentCache(KeyValueCache):
    """Latents of one layer, of which all its heads make their keys and values; the same on each tensor-parallel rank.

    The layer itself extends it, and gives its core attention keys and values of all tokens.
    """

    @override
    def append(
        self,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values, [b, ng, length, ...], which are of all tokens already."""
        return key, value

    def extend(self, latents: Tensor) -> Tensor:
        """Append the latents of the next tokens and return a view of all, [b, 1, length, width].

        Args:
            latents: [b, 1, s, width].
        """
        (visible,) = self._write(latents)
        return visible


class RecurrentCache(KeyValueCache):
    """What a layer with linear attention keeps of all tokens: the last inputs of its convolution, and its state.

    Its size does not depend on the number of tokens, so a step writes to no slot.
    """

    def states(self) -> tuple[Tensor | None, Tensor | None]:
        """Inputs of the convolution, [k - 1, b, ...], and state, [b, hv, dk, dv] fp32; None before the first token."""
        if not self._buffers:
            return None, None
        before, state = self._buffers
        return before.movedim(1, 0), state

    def update(
        self,
        inputs: Tensor,
        count: int,
        state: Tensor,
    ) -> None:
        """Keep the last inputs of the convolution, and the state.

        Args:
            inputs: [s, b, ...], those of the new tokens.
            count: How many the convolution sees besides a token's own.
            state: [b, hv, dk, dv], after the new tokens.
        """
        rows = inputs.movedim(0, 1)
        if not self._buffers:
            before = rows.new_zeros(len(rows), count, *rows.shape[2:])
            self._buffers = [before, torch.zeros_like(state)]
        before, old_state = self._buffers
        joined = torch.cat((before, rows), dim=1)
        # In place: steps that are recorded as graphs read and write the same memory.
        before.copy_(joined[:, joined.shape[1] - count :])
        old_state.copy_(state)

    @override
    def _visible(self) -> list[Tensor]:
        """All of it."""
        return self._buffers


class TokenStep:
    """Cache slot of the one token of each row, and which slots hold tokens, for all layers of a pass."""

    def __init__(self, slot: Tensor, is_token: Tensor) -> None:
        """Refer to buffers on the device, which the decoding loop updates.

        Args:
            slot: [1], int64, the slot of the newest token; the same in all rows.
            is_token: [b, slots], bool, False for padding of prompts; slots after ``slot`` are ignored.
        """
        self.slot = slot
        self.num_keys = is_token.shape[1]
        """Number of slots that a query attends to."""
        self._is_token = is_token
        self._masks: dict[Hashable, Tensor] = {}

    def additive_mask(
        self,
        window: int | None,
        alibi: Alibi | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Additive mask, [b, np or 1, 1, slots], computed once in a pass for all layers of a kind.

        Args:
            window: Latest tokens that a token sees, itself included; None for all.
            alibi: Linear biases; None for none.
            dtype: Dtype of the queries.
        """
        key = (window, alibi, dtype)
        if key not in self._masks:
            slots = torch.arange(self.num_keys, device=self.slot.device)
            hidden = ~self._is_token | (slots > self.slot)
            if window is not None:
                hidden = hidden | (slots <= self.slot - window)
            bias = None
            if alibi is not None:
                biases = masks.key_biases(alibi, self._is_token, self.num_keys, hidden.device)
                # Relative to the query, whose key is at ``slot``: small for near keys, as in ``relative_biases``.
                bias = biases - biases.index_select(-1, self.slot)
                bias = bias[:, :, None]
            self._masks[key] = masks.additive_mask(
                hidden[:, None, None],
                bias,
                dtype,
            )
        return self._masks[key]
