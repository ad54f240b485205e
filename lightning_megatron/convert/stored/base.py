"""What does a model look like at rest, whatever its format? Whole tensors under Megatron-Core's names, read by rows.

Every source gives this view and every target is written from it, so that n formats need 2n programs and not n * n.
Nothing here knows ranks: a tensor is whole, its vocabulary has no padding, its rows stand in Megatron-Core's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from lightning_megatron.models.config import ModelConfig


class Key(NamedTuple):
    """One tensor of a model."""

    name: str
    """As a rule's ``megatron``, without the layer's number: ``decoder.layers.mlp.linear_fc1.weight``."""
    layer: int | None
    """Number of the layer in its stack, from 0, over all pipeline stages; None for tensors of no layer."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a tensor is, without its numbers."""

    shape: tuple[int, ...]
    """Of the whole tensor, without rows that pad the vocabulary."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class StoredModel(Protocol):
    """A model at rest. Opening one reads names and sizes only."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def kind(self) -> str:
        """Its format, for messages: ``Hugging Face model directory``."""

    @property
    def model(self) -> ModelConfig:
        """Its description."""

    @property
    def hf_config(self) -> Any:
        """The Hugging Face config object of ``model``."""

    @property
    def tensors(self) -> Mapping[Key, Spec]:
        """All of them, in an order in which reading is fast."""

    @property
    def iteration(self) -> int:
        """Optimizer steps done when it was written; 0 if it does not say."""

    @property
    def companions(self) -> Path | None:
        """Folder with tokenizer and generation config, in Hugging Face's files, that belong to it."""

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of a tensor: [stop - start, ...], on the CPU, in the stored dtype.

        Raises:
            CheckpointError: If the file is damaged.
        """
