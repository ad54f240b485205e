"""Blends of datasets, and the folders that keep the index of each dataset and of the blend.

Datasets are taken in turn such that after every sample each has come as close to its share as it can; the greedy rule
is the engine's (megatron-core 0.16.1, datasets/helpers.cpp:build_blending_indices).

Each dataset's index is in a folder of its own, and so is the order in which a blend takes datasets; each is built once
for all jobs. A folder's name covers everything that determines its content, with sizes and times of the dataset's
files: the engine's own key has only the path (datasets/megatron_dataset.py), so after preprocessing again under the
same name it would use the index of the old file.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.indexed import check_dataset, is_old_format, open_dataset
from lightning_megatron.data.merge import convert_dataset
from lightning_megatron.data.samples import (
    Objective,
    Part,
    Rows,
    SampleOrder,
    Samples,
    SavedArrays,
    SplitName,
    build_once,
    canonical_split,
)
from lightning_megatron.errors import ConfigError

MAX_DATASETS = 32766
"""The engine numbers datasets in 16 bits."""
_SURPLUS = 0.005
"""Samples that Megatron lays out of each dataset beyond its share; they may cost a pass more, and so change the order
(megatron-core 0.16.1, blended_megatron_dataset_config.py:mid_level_dataset_surplus)."""
_MAX_OPEN = 64
"""Datasets of a blend that a process holds open: each takes about five file descriptors, of 1,024 in all."""


@dataclass(frozen=True)
class Source:
    """A dataset of a blend."""

    prefix: str
    """Without suffix."""
    weight: float | None = None
    """Its share of the samples before normalisation; None if all datasets are taken in proportion to their sizes."""


@dataclass(frozen=True, kw_only=True)
class SplitRequest:
    """What determines the samples of a split and their order."""

    name: SplitName
    """The split."""
    sources: tuple[Source, ...]
    """Datasets, as ``parse_blend`` gives them."""
    split: str
    """Weights of train, valid and test in each dataset."""
    objective: Objective
    """How samples are cut out of documents."""
    seed: int
    """Of the order, and of what is drawn for each sample."""
    num_samples: int | None
    """Samples that are needed, over as many passes as it takes; None for one pass."""

    def part(self, source: Source, num_samples: int | None) -> Part:
        """One dataset's share."""
        return Part(prefix=source.prefix, split=self.split, name=self.name, seed=self.seed, num_samples=num_samples)

    def counts(self) -> list[int]:
        """Samples in one pass over each dataset."""
        return [self.objective.count(self.part(source, None)) for source in self.sources]

    def parts(self, mixture: Mixture) -> list[Part]:
        """Each dataset's share of a blend."""
        needed = mixture.part_samples.tolist()
        return [self.part(source, samples or None) for source, samples in zip(self.sources, needed, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Mixture(SavedArrays):
    """The order of datasets in a blend."""

    dataset_index: NDArray[np.int16]
    """The dataset of each sample: [samples]."""
    sample_index: NDArray[np.int64]
    """Its number in that dataset: [samples]."""
    part_samples: NDArray[np.int64]
    """Samples that have to be laid out of each dataset, 0 for one pass: [datasets]."""


def parse_blend(data_path: str | Sequence[str | float]) -> tuple[Source, ...]:
    """The datasets that the user names, with their weights.

    Stricter than the engine, which takes a list that it does not understand for prefixes alone (megatron-core 0.16.1,
    datasets/utils.py:get_blend_from_list).

    Args:
        data_path: A prefix; prefixes, taken in proportion to their sizes; or weights and prefixes in turn, where
            weights are numbers or their spelling, e.g. ``[0.7, "books", 0.3, "web"]``. A weight of 0 leaves a dataset
            out, as it does in ``split``.

    Raises:
        ConfigError: If it is anything else.
    """
    items: list[Any] = [data_path] if isinstance(data_path, str) else list(data_path)
    shown = reprlib.repr(items)
    weights: list[float | None] = []
    if len(items) > 1 and _number(items[0]) is not None:
        weights, items = [_number(item) for item in items[::2]], items[1::2]
    are_weights = all(weight is not None and 0 <= weight < math.inf for weight in weights)
    are_prefixes = all(isinstance(item, str) and item.strip() and _number(item) is None for item in items)
    if not items or not are_prefixes or not are_weights or len(weights) not in (0, len(items)):
        raise ConfigError(f"data_path={shown} must be prefixes (./30 for 30), or finite weights and prefixes in turn")
    prefixes = [os.path.expanduser(item) for item in items]
    ((most_common, times),) = Counter(map(os.path.abspath, prefixes)).most_common(1)
    if times > 1:
        raise ConfigError(f"data_path has {most_common} {times} times; give it once, with the sum of its weights")
    pairs = zip(prefixes, weights or [None] * len(prefixes), strict=True)
    sources = tuple(Source(prefix, weight) for prefix, weight in pairs if weight != 0)
    if not 1 <= len(sources) <= MAX_DATASETS:
        raise ConfigError(f"data_path={shown} gives {len(sources)} datasets a weight, expected 1 to {MAX_DATASETS}")
    return sources


def num_samples_of_one_pass(sources: tuple[Source, ...], counts: Sequence[int]) -> int:
    """Samples of a blend that takes none twice.

    Without weights these are all. With weights the pass ends where the first dataset has none left for its share, as
    in ``interleave_datasets`` of Hugging Face datasets (``first_exhausted``). No dataset runs out before: of N samples
    the greedy rule takes at most w * (N - 1) + 1 from a dataset of weight w.

    Args:
        sources: The datasets.
        counts: Samples in one pass over each.
    """
    if len(sources) == 1 or sources[0].weight is None:
        return sum(counts)
    return min(int(count / share) for count, share in zip(counts, _shares(sources, counts), strict=True))


def mix(sources: tuple[Source, ...], counts: Sequence[int], num_samples: int | None) -> Mixture:
    """The order in which several datasets are taken.

    It equals the engine's where that has one. The engine takes no weights for one pass, and no more than one pass
    without weights; and it fails where its greedy rule takes more of a dataset than it has laid out.

    Args:
        sources: The datasets.
        counts: Samples in one pass over each.
        num_samples: Samples that are needed, over as many passes as it takes; None for one pass.
    """
    from megatron.core.datasets import helpers

    shares = _shares(sources, counts)
    laid_out = np.zeros(len(sources), dtype=np.int64)
    if num_samples is None:
        size = num_samples_of_one_pass(sources, counts)
    elif sources[0].weight is None:
        size = num_samples
    else:
        # Megatron rounds the samples of each dataset up, so there are a few more than requested.
        rounded = [math.ceil(num_samples * share) for share in shares]
        size = sum(rounded)
        laid_out[:] = [math.ceil(samples * (1 + _SURPLUS)) for samples in rounded]
        shares = _normalized(shares)  # twice, as in Megatron: the last bit may decide who comes first
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    if num_samples is None and sources[0].weight is None:
        helpers.build_exhaustive_blending_indices(dataset_index, sample_index, list(counts), len(sources))
    else:
        helpers.build_blending_indices(dataset_index, sample_index, shares, len(sources), size, False)
    part_samples = np.maximum(laid_out, np.bincount(dataset_index, minlength=len(sources)))
    part_samples[part_samples <= np.asarray(counts)] = 0
    return Mixture(dataset_index=dataset_index, sample_index=sample_index, part_samples=part_samples)


class BlendedSamples:
    """Several open datasets as one; each is opened when a sample of it is read, and only some are open at a time."""

    def __init__(self, folder: str, openers: Sequence[Callable[[], Samples]], fingerprint: str) -> None:
        """Bind the parts.

        Args:
            folder: Where the mixture is.
            openers: Open one dataset each; picklable.
            fingerprint: Of the order of datasets, and of the samples in each.
        """
        self._arguments = (folder, openers, fingerprint)
        self._mixture = Mixture.load(folder)
        self._openers = openers
        self.fingerprint = fingerprint
        self._open: OrderedDict[int, Samples] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mixture.dataset_index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, stacked; all datasets give rows of the same lengths."""
        places = np.asarray(indices, dtype=np.int64)
        datasets, samples = self._mixture.dataset_index[places], self._mixture.sample_index[places]
        groups = [np.flatnonzero(datasets == dataset) for dataset in np.unique(datasets)]
        parts = [self._dataset(int(datasets[group[0]])).rows(samples[group].tolist()) for group in groups]
        back = torch.from_numpy(np.argsort(np.concatenate(groups)))
        return {key: torch.cat([part[key] for part in parts])[back] for key in parts[0]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Maps of files do not travel to other processes, which open them again."""
        return type(self), self._arguments

    def _dataset(self, number: int) -> Samples:
        if number not in self._open:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)
            self._open[number] = self._openers[number]()
        self._open.move_to_end(number)
        return self._open[number]


def _shares(sources: tuple[Source, ...], counts: Sequence[int]) -> list[float]:
    return _normalized([c if s.weight is None else s.weight for s, c in zip(sources, counts, strict=True)])


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / array.sum()).tolist()
    return normalized


def _number(item: object) -> float | None:
    """What an item is worth as a number; None if it is none."""
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


# ---- folders of indices ---------------------------------------------------------------------------------------------

_LAYOUT = 1
"""Of the files in a folder; a change makes the old folders unknown."""


def in_mmap(source: Source, index_cache: str | None, tell: Callable[[str], None]) -> Source:
    """The dataset in today's format: itself, or what became of one of Megatron's older formats (cached, lazy).

    Such a dataset is converted once for all jobs, beside the indices that are made of it.

    Args:
        source: A dataset of any format.
        index_cache: Folder for all indices; None for one next to each dataset.
        tell: Gets a line about each thing that is done.

    Raises:
        DataError: If it is damaged, or the folder cannot be written.
    """
    if not is_old_format(source.prefix):
        return source
    folder, name = _folder(("mmap",), _identity(source.prefix), source.prefix, index_cache), Path(source.prefix).name

    def write(staging: str) -> SampleOrder:
        tell(f"{source.prefix} is in Megatron's old cached/lazy format; converting it into {folder}, once")
        result = convert_dataset(source.prefix, os.path.join(staging, name))
        for note in result.notes:
            tell(note)
        return SampleOrder(num_samples=result.sequences, fingerprint="as stored")

    build_once(folder, write, source.prefix)
    return replace(source, prefix=os.path.join(folder, name))


def check_request(request: SplitRequest, *, is_used: bool) -> None:
    """Check every dataset; reads ``.idx`` only, and writes nothing.

    Args:
        request: Which samples.
        is_used: Whether there must be samples in each.

    Raises:
        DataError: If a dataset is missing or damaged, or has not one sample for a split that is used; it is named.
    """
    for source in request.sources:
        open_dataset(source.prefix)
        _check_once(source.prefix, _identity(source.prefix))
    if is_used:
        request.counts()


def open_samples(request: SplitRequest, index_cache: str | None) -> Samples:
    """The samples, after building on disk whatever this machine does not see there.

    Args:
        request: Which samples.
        index_cache: Folder for all indices; None for one next to each dataset.

    Raises:
        DataError: If a dataset is missing on this machine, or a folder cannot be written.
    """
    for source in request.sources:
        open_dataset(source.prefix)
    folder, order = _built(request, index_cache)
    if len(request.sources) == 1:
        return request.objective.open(request.part(request.sources[0], request.num_samples), folder)
    openers: list[Callable[[], Samples]] = []
    for part in request.parts(Mixture.load(folder)):
        folder_of_part, _ = _built_part(request.objective, part, index_cache)
        openers.append(partial(request.objective.open, part, folder_of_part))
    return BlendedSamples(folder, openers, order.fingerprint)


@lru_cache(maxsize=4096)
def _check_once(prefix: str, identity: object) -> None:
    """All splits of a run have the same datasets, and an index may have gigabytes."""
    check_dataset(prefix)


def _built(request: SplitRequest, index_cache: str | None) -> tuple[str, SampleOrder]:
    """The folder of an index that is on disk now, and the order in it."""
    sources, objective = request.sources, request.objective
    if len(sources) == 1:
        return _built_part(objective, request.part(sources[0], request.num_samples), index_cache)

    def write(staging: str) -> SampleOrder:
        mixture = mix(sources, request.counts(), request.num_samples)
        orders = [_built_part(objective, part, index_cache)[1] for part in request.parts(mixture)]
        mixture.save(staging)
        digest = hashlib.sha256(repr([order.fingerprint for order in orders]).encode())
        digest.update(mixture.dataset_index[:4096].tobytes())
        return SampleOrder(num_samples=len(mixture.dataset_index), fingerprint=digest.hexdigest()[:16])

    key = (objective.index_key, canonical_split(request.split), request.name, request.seed, request.num_samples)
    identity = (key, [(_identity(source.prefix), source.weight) for source in sources])
    folder = _folder((objective.name, request.name, "blend"), identity, sources[0].prefix, index_cache)
    return folder, build_once(folder, write, f"the blend of {', '.join(source.prefix for source in sources[:3])}")


def _built_part(objective: Objective, part: Part, index_cache: str | None) -> tuple[str, SampleOrder]:
    def write(staging: str) -> SampleOrder:
        samples = objective.open(part, staging)
        return SampleOrder(num_samples=len(samples), fingerprint=samples.fingerprint)

    key = (objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples)
    folder = _folder((objective.name, part.name), (key, _identity(part.prefix)), part.prefix, index_cache)
    return folder, build_once(folder, write, part.prefix)


def _folder(names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_LAYOUT, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _identity(prefix: str) -> tuple[object, ...]:
    """Tells a dataset from the one that was at the same place before."""
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))
