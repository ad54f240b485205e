"""What has the model read so far? The prompts, then a token of each row at a time, each at its place and position."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.passes import NextTokens
from lightning_megatron.generate.prompts import Prompts
from lightning_megatron.generate.stages import Stages


class Reading:
    """The rows of one copy of the model while they grow; all its ranks must call alike."""

    def __init__(self, stages: Stages, prompts: Prompts, max_new_tokens: int) -> None:
        """Nothing is read yet.

        Args:
            stages: With empty caches.
            prompts: On the device.
            max_new_tokens: By how many tokens the rows may grow.
        """
        self._stages = stages
        rows, self._width = prompts.tokens.shape
        self._longest = prompts.longest
        self._positions = prompts.positions
        self._mask: Tensor | None = None
        if prompts.is_padded:
            ones = prompts.tokens.new_ones(rows, max_new_tokens)
            self._mask = torch.cat((prompts.is_token, ones), dim=-1)
        self._prompts: Tensor | None = prompts.tokens
        self._source, self._source_mask = prompts.source, prompts.source_mask

    def prompts(self) -> Tensor | None:
        """Read the prompts; what follows each: [b, padded vocabulary] on the last stage, None elsewhere."""
        assert self._prompts is not None, "the prompts are read once"
        tokens, self._prompts = self._prompts, None
        return self._read(tokens)

    def token(self, tokens: Tensor) -> Tensor | None:
        """Read one more token of each row; what follows it, as from ``prompts``.

        Args:
            tokens: [b].
        """
        if self._source is not None:
            self._source = tokens.new_empty(len(tokens), 0)  # the encoder reads once
        self._width, self._longest, self._positions = self._width + 1, self._longest + 1, self._positions[:, -1:] + 1
        return self._read(tokens[:, None])

    def select(self, rows: Tensor, rows_per_prompt: int) -> None:
        """Row i becomes what row ``rows[i]`` was; as ``Stages.select``."""
        self._stages.select(rows, rows_per_prompt)
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]
        if self._source_mask is not None:
            self._source_mask = self._source_mask[rows]

    def _read(self, tokens: Tensor) -> Tensor | None:
        mask = None if self._mask is None else self._mask[:, : self._width]
        return self._stages.logits(
            NextTokens(
                tokens=tokens,
                positions=self._positions,
                mask=mask,
                longest=self._longest,
                source=self._source,
                source_mask=self._source_mask,
            )
        )
