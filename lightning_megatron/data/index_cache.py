"""Indices of datasets and blends, cached on disk.

Each index has its own directory and is built once for all jobs. The name of the directory covers everything that
determines its content, including sizes and times of the dataset's files: the engine's own key has only the path
(datasets/megatron_dataset.py), so after preprocessing again under the same name it would use the index of the old file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial

from lightning_megatron.data.blends import BlendedSamples, BlendIndex, build_blend_index
from lightning_megatron.data.build_once import build_once
from lightning_megatron.data.contents import hash_of_indexed, with_contents
from lightning_megatron.data.indexed import open_dataset
from lightning_megatron.data.samples import Objective, Part, Samples
from lightning_megatron.data.splits import canonical_split

_FORMAT_VERSION = 1
"""Version of the files of an index; a change invalidates existing directories."""


def open_samples(
    objective: Objective,
    parts: Sequence[Part],
    index_cache: str | None,
) -> Samples:
    """Open the samples of a split, after building the indices that are not on disk.

    Args:
        objective: How documents become samples.
        parts: One for each dataset of the blend; they differ in prefix and weight.
        index_cache: Directory for all indices; None for one next to each dataset.

    Raises:
        DataError: If a dataset is missing on this machine, or a directory cannot be written.
    """
    first = parts[0]
    if len(parts) == 1:
        folder, _ = _cached_index(objective, first, index_cache)
        return objective.open(first, folder)

    def write(staging: str) -> str:
        weights = [part.weight for part in parts]
        counts = [objective.count(part) for part in parts]
        blend = build_blend_index(weights, counts, first.num_samples)
        blend.save(staging)
        fingerprints = []
        for part in blend.sized_parts(parts):
            _, fingerprint = _cached_index(objective, part, index_cache)
            fingerprints.append(fingerprint)
        digest = hashlib.sha256(repr(fingerprints).encode())
        digest.update(blend.dataset_index[:4096].tobytes())
        return digest.hexdigest()[:16]

    identity = (
        _part_key(objective, first),
        [(_dataset_identity(part.prefix), part.weight) for part in parts],
    )
    names = (objective.name, first.name, "blend")
    folder = _index_folder(names, identity, first.prefix, index_cache)
    listed = ", ".join(part.prefix for part in parts[:3])
    order = build_once(folder, write, f"the blend of {listed}")
    datasets = (open_dataset(part.prefix) for part in parts)
    contents = hash_of_indexed(datasets, len(parts))
    blend = BlendIndex.load(folder)
    openers = []
    for part in blend.sized_parts(parts):
        part_folder, _ = _cached_index(objective, part, index_cache)
        openers.append(partial(objective.open, part, part_folder))
    return BlendedSamples(blend, openers, with_contents(order, contents))


def _cached_index(
    objective: Objective,
    part: Part,
    index_cache: str | None,
) -> tuple[str, str]:
    """Directory of the index of ``part``, built if it is missing, and the fingerprint of its samples."""

    def write(staging: str) -> str:
        objective.build_index(part).save(staging)
        return objective.open(part, staging).order_fingerprint

    identity = (_part_key(objective, part), _dataset_identity(part.prefix))
    folder = _index_folder(
        (objective.name, part.name),
        identity,
        part.prefix,
        index_cache,
    )
    return folder, build_once(folder, write, part.prefix)


def _part_key(objective: Objective, part: Part) -> tuple[object, ...]:
    return (
        objective.index_key,
        canonical_split(part.split),
        part.name,
        part.seed,
        part.num_samples,
    )


def _index_folder(
    names: tuple[str, ...],
    identity: object,
    prefix: str,
    index_cache: str | None,
) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    versioned = repr((_FORMAT_VERSION, identity))
    digest = hashlib.sha256(versioned.encode()).hexdigest()
    name = "-".join((*names, digest[:24]))
    return os.path.join(os.path.abspath(root), name)


def _dataset_identity(prefix: str) -> tuple[object, ...]:
    """Path, sizes and modification times, which differ if the dataset was written again.

    Raises:
        DataError: If the dataset is missing on this machine.
    """
    open_dataset(prefix)
    index = os.stat(f"{prefix}.idx")
    tokens = os.stat(f"{prefix}.bin")
    return (
        os.path.abspath(prefix),
        (index.st_size, index.st_mtime_ns),
        (tokens.st_size, tokens.st_mtime_ns),
    )
