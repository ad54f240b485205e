"""Checkpoints to read: a ``Source`` is one of a format, a ``ModelSource`` also knows which model it holds.

A source is opened by its headers. ``describe`` says which model its tensors are of, ``match`` finds the tensors of a
model in it, and ``read`` reads them region by region.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.convert.shards import Key, Region
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.adapter_names import is_adapter, is_trained_with_lora
from lightning_megatron.models.config import ModelConfig

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Supported dtypes of stored weights."""
_MAX_NAMED = 20
NO_WEIGHTS = re.compile(
    r"_extra_state|(^|\.)(rng_state|inv_freq|masked_bias|position_ids|(attn|attention)\.bias)(\.|$|/)"
)
"""Entries of a checkpoint that are no weights: fp8 scales, random number generator states and recomputed buffers."""


class Stored(NamedTuple):
    """Shape and dtype of one full tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    location: Any = None
    """Where the values are stored, in terms of the format."""

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Description(NamedTuple):
    """Which model a checkpoint holds."""

    model: ModelConfig
    hf_config: Any
    """Hugging Face config object of ``model``."""


class Source(ABC):
    """Checkpoint of one format.

    Args:
        path: Directory or file of the checkpoint; only headers are read.

    Raises:
        CheckpointError: If the checkpoint is damaged, unfinished or unsafe.
    """

    kind: str
    """Name of the format, for messages, e.g. ``Hugging Face model directory``."""
    stored: Mapping[str, Stored]
    """All tensors of the checkpoint, by their names in the format."""
    metadata: Mapping[str, Any]
    """Everything else that the checkpoint records, as plain data for ``inspect``."""
    iteration: int = 0
    """Optimizer steps done when the checkpoint was written; 0 if unknown."""
    companions: Path | None = None
    """Directory with the tokenizer and generation config of the model."""
    base: str | None = None
    """Name or directory of the base model of the adapters, if known."""
    has_base_weights: bool = True
    """Whether the checkpoint holds weights other than adapters."""
    has_adapters: bool = True
    """Whether the format stores adapters, if the model has any."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def describe(self, config: Path | None) -> Description:
        """Find out which model the checkpoint holds.

        Args:
            config: Hugging Face ``config.json``, or a directory with one; None: use what the checkpoint records.

        Raises:
            CheckpointError: If the checkpoint does not record its model, or no known family computes it.
            ConfigError: If the config is unsupported, or would have no effect.
        """

    def holds(self, key: Key) -> bool:
        """Whether the tensor belongs in this checkpoint; ``match`` is called with such keys only."""
        if is_adapter(key.name):
            return self.has_adapters
        is_head = is_trained_with_lora(key.name)
        return self.has_base_weights or (is_head and self.has_adapters)

    @abstractmethod
    def match(
        self, model: ModelConfig, expected: Mapping[Key, tuple[int, ...]]
    ) -> Mapping[Key, torch.dtype]:
        """Find the tensors of a model in the checkpoint, for ``read``; does not communicate.

        Args:
            model: The model.
            expected: Full shapes of its tensors.

        Returns:
            Stored dtype of each tensor found; those of a head may be absent.

        Raises:
            CheckpointError: Listing all tensors that are missing, unexpected, or of another shape or an unsupported
                dtype.
        """

    @abstractmethod
    def read(self, region: Region) -> torch.Tensor:
        """Values of an unpadded region; may be a view of the mapped file, so copy before keeping it."""

    @property
    def weights(self) -> dict[str, Stored]:
        """``stored`` without optimizer state."""
        return {
            name: tensor for name, tensor in self.stored.items() if ".optimizer." not in f".{name}"
        }

    def check(
        self,
        model: ModelConfig,
        found: Mapping[Any, Stored],
        expected: Mapping[Any, tuple[int, ...]],
    ) -> None:
        """Compare the tensors found with those of the model.

        Args:
            model: The model.
            found: Tensors of the checkpoint, by name or key; Megatron's vocabulary tensors may have padding.
            expected: Full shapes of the model's tensors, by the same names or keys.

        Raises:
            CheckpointError: Listing all mismatches.
        """
        problems = [f"'{name}' is missing" for name in expected if name not in found]
        for name, stored in found.items():
            if name in expected:
                problem = _mismatch(str(name), stored, expected[name])
            else:
                problem = "is not part of the model"
            if problem:
                problems.append(f"'{name}' {problem}")
        self.raise_mismatches(model, problems)

    def raise_mismatches(self, model: ModelConfig, problems: Sequence[str]) -> None:
        """Raise if ``problems`` is not empty.

        Raises:
            CheckpointError: Listing the first ``_MAX_NAMED`` problems.
        """
        if not problems:
            return
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "; ".join(problems[:_MAX_NAMED])
        if len(problems) > _MAX_NAMED:
            listed += f"; and {len(problems) - _MAX_NAMED} more"
        raise CheckpointError(
            f"the weights in {self.path} are not those of this {model.family} model ({model.task}), {count}: {listed}. "
            "Use the config that belongs to the weights, and all of their files, unquantized"
        )


def _mismatch(
    name: str,
    stored: Stored,
    expected: tuple[int, ...],
) -> str | None:
    """What is wrong with a stored tensor of the model; None if nothing is."""
    shape = stored.shape
    is_padded = name in VOCABULARY and shape > expected and shape[1:] == expected[1:]
    if shape != expected and not is_padded:
        return f"has the shape {list(shape)}, not {list(expected)}"
    if stored.dtype not in _FLOATS:
        dtype = str(stored.dtype).removeprefix("torch.")
        return f"is {dtype}, not float32, float16 or bfloat16"
    return None


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A checkpoint and the model that it holds."""

    parts: tuple[Source, ...]
    """Sources that together hold all tensors of the model: the base weights first, if they are separate."""
    model: ModelConfig
    hf_config: Any
    """Hugging Face config object of ``model``."""
    kind: str
    """Name of the format, for messages."""
    base: str | None
    """Name or directory of the base model of the adapters, if known."""
    companions: Path | None
    """Directory with the tokenizer and generation config of the model."""

    @classmethod
    def of(cls, source: Source, config: Path | None) -> ModelSource:
        """Describe a source that holds all tensors of its model; for ``config`` see ``Source.describe``.

        Raises:
            CheckpointError: See ``Source.describe``.
            ConfigError: Likewise.
        """
        description = source.describe(config)
        return cls(
            parts=(source,),
            model=description.model,
            hf_config=description.hf_config,
            kind=source.kind,
            base=source.base,
            companions=source.companions,
        )

    @property
    def path(self) -> Path:
        """Directory or file of the checkpoint."""
        return self.parts[-1].path

    @property
    def iteration(self) -> int:
        """Optimizer steps done when the checkpoint was written; 0 if unknown."""
        return self.parts[-1].iteration

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the largest weight."""
        weights = self.parts[0].weights.values()
        nothing = Stored((), torch.float32)
        return max(weights, key=lambda tensor: tensor.num_bytes, default=nothing).dtype
