"""Blends: samples of several datasets as one.

Samples come from the datasets such that after each sample every dataset is as close to its share as possible; the
greedy rule is the engine's (megatron-core 0.16.1, datasets/helpers.cpp:build_blending_indices).
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.samples import Part, Rows, Samples, SavedArrays
from lightning_megatron.errors import ConfigError

MAX_DATASETS = 32766
"""The engine numbers datasets in 16 bits."""
_SURPLUS = 0.005
"""Fraction of samples that Megatron indexes of each dataset beyond its share; it may need one more pass for them, which
changes the order (megatron-core 0.16.1, blended_megatron_dataset_config.py:mid_level_dataset_surplus)."""
_MAX_OPEN = 64
"""Datasets of a blend that a process keeps open: each takes about five of 1,024 file descriptors."""


def parse_blend(data_path: str | Sequence[str | float]) -> list[tuple[str, float | None]]:
    """Prefix and weight of each dataset of a blend; the weight is None where sizes decide.

    Stricter than the engine, which takes a list that it cannot parse for prefixes alone (megatron-core 0.16.1,
    datasets/utils.py:get_blend_from_list).

    Args:
        data_path: A prefix; prefixes, blended in proportion to their sizes; or alternating weights and prefixes, where
            weights are numbers or strings, e.g. ``[0.7, "books", 0.3, "web"]``. A weight of 0 leaves a dataset out, as
            it does in ``split``.

    Raises:
        ConfigError: If it is anything else.
    """
    is_one = isinstance(data_path, str) or not isinstance(data_path, Sequence)
    items: list[Any] = [data_path] if is_one else list(data_path)
    shown = reprlib.repr(items)
    weights: list[float | None] = []
    if len(items) > 1 and _parse_number(items[0]) is not None:
        weights = [_parse_number(item) for item in items[::2]]
        items = items[1::2]
    are_weights = all(weight is not None and 0 <= weight < math.inf for weight in weights)
    are_prefixes = all(map(_is_prefix, items))
    if not items or not are_prefixes or not are_weights or len(weights) not in (0, len(items)):
        raise ConfigError(
            f"data_path={shown} must be prefixes (./30 for 30), or finite weights and prefixes in turn"
        )
    if not weights:
        weights = [None] * len(items)
    prefixes = map(os.path.expanduser, items)
    blend = [
        (prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight != 0
    ]
    if not 1 <= len(blend) <= MAX_DATASETS:
        raise ConfigError(
            f"data_path={shown} gives {len(blend)} datasets a weight, expected 1 to {MAX_DATASETS}"
        )
    return blend


def _is_prefix(item: object) -> bool:
    return isinstance(item, str) and bool(item.strip()) and _parse_number(item) is None


def _parse_number(item: object) -> float | None:
    """The number that an item is or spells; None if it does not."""
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class BlendIndex(SavedArrays):
    """Order in which a blend takes samples from its datasets."""

    dataset_index: NDArray[np.int16]
    """The dataset of each sample: [samples]."""
    sample_index: NDArray[np.int64]
    """Index of each sample within its dataset: [samples]."""
    part_samples: NDArray[np.int64]
    """Samples to index of each dataset, 0 for one pass: [datasets]."""

    def sized_parts(self, parts: Sequence[Part]) -> list[Part]:
        """``parts`` with the number of samples that the blend needs of each."""
        numbers = self.part_samples.tolist()
        return [
            replace(part, num_samples=number or None)
            for part, number in zip(parts, numbers, strict=True)
        ]


def build_blend_index(
    weights: Sequence[float | None],
    counts: Sequence[int],
    num_samples: int | None,
) -> BlendIndex:
    """Build the order in which a blend takes samples from its datasets.

    It equals the engine's where that has one. The engine supports neither weights for one pass nor several passes
    without weights, and fails where its greedy rule takes more samples of a dataset than it has indexed.

    One pass takes no sample twice. Without weights it has all samples; with weights it ends where the first dataset has
    too few left for its share, as ``interleave_datasets`` of Hugging Face datasets (``first_exhausted``). No dataset
    runs out before: of N samples the greedy rule takes at most w * (N - 1) + 1 from a dataset of weight w.

    Args:
        weights: Weights of the datasets; all None to blend in proportion to sizes.
        counts: Samples in one pass over each dataset.
        num_samples: Samples needed, in as many passes as it takes; None for one pass.
    """
    # Megatron's import takes seconds.
    from megatron.core.datasets import helpers

    is_weighted = weights[0] is not None
    shares = np.array(weights if is_weighted else counts, dtype=np.float64)
    shares = shares / shares.sum()
    indexed = np.zeros(len(weights), dtype=np.int64)
    if num_samples is None:
        size = int(min(counts / shares)) if is_weighted else sum(counts)
    elif not is_weighted:
        size = num_samples
    else:
        # Megatron rounds up the samples of each dataset, so there are a few more than requested.
        rounded = np.ceil(num_samples * shares)
        size = int(rounded.sum())
        indexed[:] = np.ceil(rounded * (1 + _SURPLUS))
        # Twice, as in Megatron: the last bit may decide which dataset is first.
        shares = shares / shares.sum()
    dataset_index = np.zeros(size, dtype=np.int16)
    sample_index = np.zeros(size, dtype=np.int64)
    if num_samples is None and not is_weighted:
        helpers.build_exhaustive_blending_indices(
            dataset_index,
            sample_index,
            list(counts),
            len(weights),
        )
    else:
        helpers.build_blending_indices(
            dataset_index,
            sample_index,
            shares,
            len(weights),
            size,
            False,
        )
    part_samples = np.maximum(
        indexed,
        np.bincount(dataset_index, minlength=len(weights)),
    )
    part_samples[part_samples <= np.asarray(counts)] = 0
    return BlendIndex(
        dataset_index=dataset_index, sample_index=sample_index, part_samples=part_samples
    )


class BlendedSamples:
    """Samples of several datasets as one; a dataset is opened when it is read, and only some are open at a time.

    Args:
        blend: Order of the datasets.
        openers: Functions that open one dataset each; picklable.
        fingerprint: Fingerprint of the order of datasets, and of the samples of each.
    """

    def __init__(
        self,
        blend: BlendIndex,
        openers: Sequence[Callable[[], Samples]],
        fingerprint: str,
    ) -> None:
        self._blend = blend
        self._openers = openers
        self.fingerprint = fingerprint
        self._dataset = lru_cache(_MAX_OPEN)(lambda index: openers[index]())

    def __len__(self) -> int:
        return len(self._blend.dataset_index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, stacked; rows of all datasets have the same lengths."""
        positions = np.asarray(indices, dtype=np.int64)
        datasets = self._blend.dataset_index[positions]
        samples = self._blend.sample_index[positions]
        groups = []
        parts = []
        for dataset in np.unique(datasets).tolist():
            group = np.flatnonzero(datasets == dataset)
            groups.append(group)
            parts.append(self._dataset(dataset).rows(samples[group].tolist()))
        order = torch.from_numpy(np.argsort(np.concatenate(groups)))
        return {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open datasets: another process opens its own."""
        return BlendedSamples, (self._blend, self._openers, self.fingerprint)
