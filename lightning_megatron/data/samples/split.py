"""Which documents belong to training, validation and test?"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import numpy as np

from lightning_megatron.errors import ConfigError

SplitName: TypeAlias = Literal["train", "valid", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")

_WEIGHT = re.compile(r"\d+(\.\d*)?|\.\d+")


def parse_split(split: str) -> tuple[float, float, float]:
    """Weights of training, validation and test; missing ones are 0.

    Stricter than the engine, which picks whatever looks like a number: it reads ``-1,1`` as ``1,1`` and ``1e-3`` as
    ``1`` and ``3`` (megatron-core 0.16.1, datasets/blended_megatron_dataset_config.py:parse_and_normalize_split).

    Args:
        split: Up to three numbers between commas or slashes, e.g. ``949,50,1``.

    Raises:
        ConfigError: If it is anything else, or all weights are 0.
    """
    parts = [part.strip() for part in re.split("[,/]", split)]
    rule = "must be one to three weights like 949,50,1 (digits and points, no signs or exponents)"
    for part in parts:
        if not _WEIGHT.fullmatch(part):
            raise ConfigError(f"split={split!r} {rule}; {part!r} is not one")
    if len(parts) > len(SPLIT_NAMES):
        raise ConfigError(f"split={split!r} has {len(parts)} weights and {rule}; give one for train, valid and test")
    weights = [float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts))
    if sum(weights) == 0:
        raise ConfigError(f"split={split!r} gives no documents to any split; make at least one weight positive")
    return weights[0], weights[1], weights[2]


def canonical_split(split: str) -> str:
    """The same weights in the only spelling that the engine cannot misread."""
    return ",".join(np.format_float_positional(weight, trim="-") for weight in parse_split(split))


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, range]:
    """Sequences of each split; an empty range where the weight is 0 or too small for one sequence.

    The same floating-point steps as the engine, so that the bounds agree to the last document (megatron-core 0.16.1,
    convert_split_vector_to_split_matrix and blended_megatron_dataset_builder.py:_build_megatron_dataset_splits).
    """
    weights = np.array(parse_split(split), dtype=np.float64)
    fractions = (weights / weights.sum()).tolist()
    ranges: dict[SplitName, range] = {}
    low = 0.0
    for name, fraction in zip(SPLIT_NAMES, fractions, strict=True):
        high = low + fraction
        ranges[name] = range(int(round(low * num_sequences)), int(round(high * num_sequences)))
        low = high
    return ranges


def weighted_splits(split: str) -> list[SplitName]:
    """The splits that get documents.

    Raises:
        ConfigError: As ``parse_split``.
    """
    return [name for name, weight in zip(SPLIT_NAMES, parse_split(split), strict=True) if weight > 0]


def whole_split(name: SplitName) -> str:
    """The split that gives all documents to ``name``."""
    return ",".join("1" if each == name else "0" for each in SPLIT_NAMES)
