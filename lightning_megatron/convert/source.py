"""``Source``: a checkpoint of one format, opened by its headers, described as a model and read region by region."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.convert.shards import Key, Region
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.adapter_names import is_adapter
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


class Source(ABC):
    """Checkpoint of one format: opened by its headers, then described as a model, matched with it and read.

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
    model: ModelConfig
    """Config of the model; set by ``describe``."""
    hf_config: Any
    """Hugging Face config object of ``model``; set by ``describe``."""
    iteration: int = 0
    """Optimizer steps done when the checkpoint was written; 0 if unknown."""
    companions: Path | None = None
    """Directory with the tokenizer and generation config of the model."""
    base: str | None = None
    """Name or directory of the base model of the adapters, if known."""
    frozen: Source | None = None
    """Source of the base weights of a checkpoint that holds adapters only; opened by ``describe_with_base``."""
    has_base_weights: bool = True
    """Whether the checkpoint holds weights other than adapters."""
    has_adapters: bool = True
    """Whether the format stores adapters, if the model has any."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def describe(self, config: Path | None) -> None:
        """Set ``model`` and ``hf_config``.

        Args:
            config: Hugging Face ``config.json``, or a directory with one; None: use what the checkpoint records.

        Raises:
            CheckpointError: If the checkpoint does not record its model, or no known family computes it.
            ConfigError: If the config is unsupported, or would have no effect.
        """

    def holds(self, key: Key) -> bool:
        """Whether the tensor belongs in this checkpoint; ``match`` is called with such keys only."""
        return self.has_adapters if is_adapter(key.name) else self.has_base_weights

    @abstractmethod
    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> Mapping[Key, torch.dtype]:
        """Find the tensors of the model in the checkpoint; does not communicate.

        Args:
            expected: Full shapes of the model's tensors.

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
    def sources(self) -> tuple[Source, ...]:
        """Sources that together hold all tensors of the model: the base weights first, if they are separate."""
        return (self,) if self.frozen is None else (self.frozen, self)

    @property
    def weights(self) -> dict[str, Stored]:
        """``stored`` without optimizer state."""
        return {
            name: tensor for name, tensor in self.stored.items() if ".optimizer." not in f".{name}"
        }

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the largest weight."""
        weights = self.sources[0].weights.values()
        return max(
            weights, key=lambda tensor: tensor.num_bytes, default=Stored((), torch.float32)
        ).dtype

    def check(self, found: Mapping[Any, Stored], expected: Mapping[Any, tuple[int, ...]]) -> None:
        """Compare the tensors found with those of the model.

        Args:
            found: Tensors of the checkpoint, by name or key; Megatron's vocabulary tensors may have padding.
            expected: Full shapes of the model's tensors, by the same names or keys.

        Raises:
            CheckpointError: Listing all mismatches.
        """
        problems = [f"'{name}' is missing" for name in expected if name not in found]
        for name, (shape, dtype, _) in found.items():
            full = expected.get(name)
            if full is None:
                problems.append(f"'{name}' is not part of the model")
            elif shape != full and not (
                str(name) in VOCABULARY and shape > full and shape[1:] == full[1:]
            ):
                problems.append(f"'{name}' has the shape {list(shape)}, not {list(full)}")
            elif dtype not in _FLOATS:
                problems.append(
                    f"'{name}' is {str(dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
                )
        self.raise_mismatches(problems)

    def raise_mismatches(self, problems: Sequence[str]) -> None:
        """Raise if ``problems`` is not empty.

        Raises:
            CheckpointError: Listing the first ``_MAX_NAMED`` problems.
        """
        if problems:
            more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise CheckpointError(
                f"the weights in {self.path} are not those of this {self.model.family} model ({self.model.task}), "
                f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {'; '.join(problems[:_MAX_NAMED])}{more}"
                ". Use the config that belongs to the weights, and all of their files, unquantized"
            )
