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
from lightning_megatron.data.indexed import open_dataset
from lightning_megatron.data.samples import Objective, Part, Samples
from lightning_megatron.data.splits import canonical_split

_FORMAT_VERSION = 1
"""Version of the files of an index; a change invalidates existing directories."""


def open_samples(objective: Objective, parts: Sequence[Part], index_cache: str | None) -> Samples:
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
        return objective.open(first, _cached_index(objective, first, index_cache)[0])

    def write(staging: str) -> str:
        blend = build_blend_index(
            [part.weight for part in parts], list(map(objective.count, parts)), first.num_samples
        )
        blend.save(staging)
        fingerprints = [
            _cached_index(objective, part, index_cache)[1] for part in blend.sized_parts(parts)
        ]
        digest = hashlib.sha256(repr(fingerprints).encode())
        digest.update(blend.dataset_index[:4096].tobytes())
        return digest.hexdigest()[:16]

    identity = (
        _part_key(objective, first),
        [(_dataset_identity(part.prefix), part.weight) for part in parts],
    )
    folder = _index_folder(
        (objective.name, first.name, "blend"), identity, first.prefix, index_cache
    )
    fingerprint = build_once(
        folder, write, f"the blend of {', '.join(part.prefix for part in parts[:3])}"
    )
    blend = BlendIndex.load(folder)
    shares = [
        (part, _cached_index(objective, part, index_cache)[0]) for part in blend.sized_parts(parts)
    ]
    return BlendedSamples(blend, [partial(objective.open, *share) for share in shares], fingerprint)


def _cached_index(objective: Objective, part: Part, index_cache: str | None) -> tuple[str, str]:
    """Directory of the index of ``part``, built if it is missing, and the fingerprint of its samples."""

    def write(staging: str) -> str:
        objective.build_index(part).save(staging)
        return objective.open(part, staging).fingerprint

    identity = (_part_key(objective, part), _dataset_identity(part.prefix))
    folder = _index_folder((objective.name, part.name), identity, part.prefix, index_cache)
    return folder, build_once(folder, write, part.prefix)


def _part_key(objective: Objective, part: Part) -> tuple[object, ...]:
    return objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples


def _index_folder(
    names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None
) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_FORMAT_VERSION, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _dataset_identity(prefix: str) -> tuple[object, ...]:
    """Path, sizes and modification times, which differ if the dataset was written again.

    Raises:
        DataError: If the dataset is missing on this machine.
    """
    open_dataset(prefix)
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))
