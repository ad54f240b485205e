"""Splits of a dataset into training, validation and test documents, by Megatron's rule."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import numpy as np

from lightning_megatron.errors import ConfigError

SplitName: TypeAlias = Literal["train", "valid", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")

_WEIGHT = re.compile(r"\d+(\.\d*)?|\.\d+")


def parse_split(split: str) -> tuple[float, float, float]:
    """Weights of the training, validation and test split; missing ones are 0.

    Stricter than the engine, which picks whatever looks like a number: it reads ``-1,1`` as ``1,1`` and ``1e-3`` as
    ``1`` and ``3`` (megatron-core 0.16.1, datasets/blended_megatron_dataset_config.py:parse_and_normalize_split).

    Args:
        split: Up to three numbers between commas or slashes, e.g. ``949,50,1``.

    Raises:
        ConfigError: If it is anything else, or all weights are 0.
    """
    parts = [part.strip() for part in re.split("[,/]", split)]
    is_valid = all(map(_WEIGHT.fullmatch, parts)) and any(map(float, parts))
    if not is_valid or len(parts) > len(SPLIT_NAMES):
        raise ConfigError(
            f"split={split!r} must be one to three weights like 949,50,1 of digits and points, not all 0"
        )
    weights = [float(part) for part in parts]
    weights += [0.0] * (len(SPLIT_NAMES) - len(parts))
    train, valid, test = weights
    return train, valid, test


def canonical_split(split: str) -> str:
    """The same weights, in a spelling that the engine cannot misread."""
    return ",".join(np.format_float_positional(weight, trim="-") for weight in parse_split(split))


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, range]:
    """Sequences of each split; an empty range where the weight is 0 or too small for one sequence.

    By the same floating-point steps as the engine, so the bounds agree to the last document (megatron-core 0.16.1,
    convert_split_vector_to_split_matrix and blended_megatron_dataset_builder.py:_build_megatron_dataset_splits).
    """
    weights = np.array(parse_split(split), dtype=np.float64)
    shares = (weights / weights.sum()).tolist()
    bounds = accumulate(shares, initial=0.0)
    pairs = pairwise(int(round(bound * num_sequences)) for bound in bounds)
    return {name: range(*pair) for name, pair in zip(SPLIT_NAMES, pairs, strict=True)}
