"""Paths of the splits of a data module, and checks of a source against the model."""

from __future__ import annotations

from typing import Any

from lightning_megatron.data.splits import SPLIT_NAMES, SplitName, parse_split
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import ModelConfig


def split_sources(
    data_path: Any,
    split: str,
    default_split: str,
    **own_paths: Any,
) -> dict[SplitName, tuple[Any, str]]:
    """Path of each split that has data, and the weights by which the splits of this path divide it.

    Args:
        data_path: Path that all splits share.
        split: Weights by which they divide it.
        default_split: The option's default.
        own_paths: Path of each split alone.

    Raises:
        ConfigError: If there is no path, or both a shared one, or its weights, and those of single splits.
    """
    alone: dict[Any, Any] = {name: path for name, path in own_paths.items() if path is not None}
    if (data_path is None) != bool(alone):
        given = ", ".join(f"{name}_data_path={path}" for name, path in alone.items())
        raise ConfigError(
            f"data_path={data_path} with {given or 'no path of a single split'}: expected data_path and split, or "
            "only paths of splits"
        )
    if data_path is None and split != default_split:
        raise ConfigError(
            f"split={split!r}: expected data_path, which it divides, got paths of single splits; leave it out"
        )
    if data_path is None:
        weights_alone = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}
        return {name: (path, weights_alone[name]) for name, path in alone.items()}
    weights = zip(SPLIT_NAMES, parse_split(split), strict=True)
    return {name: (data_path, split) for name, weight in weights if weight > 0}


def check_gpt(model: ModelConfig | None, what: str) -> None:
    """Refuse a model that is no GPT; ``what`` begins the message."""
    if model is not None and model.architecture != "gpt":
        raise ConfigError(f"{what}, and {model.family} is a {model.architecture.upper()}")


def check_token(largest: int, model: ModelConfig | None, source: str) -> None:
    """Refuse a token outside of the model's vocabulary, which would end the run inside a CUDA kernel."""
    if model is not None and largest >= model.vocab_size:
        raise DataError(
            f"{source}: expected tokens below the model's vocab_size={model.vocab_size}, got {largest}"
        )
