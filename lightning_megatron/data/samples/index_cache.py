"""Where are the indices of a split, each built once for all jobs, and are there any samples in it?

Each dataset's index is in a folder of its own, and so is the order in which a blend takes datasets. A folder's name
covers everything that determines its content, with sizes and times of the dataset's files: the engine's own key has
only the path (megatron-core 0.16.1, datasets/megatron_dataset.py), so after preprocessing again under the same name it
would use the index of the old file.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from functools import lru_cache, partial

from lightning_megatron.data.formats.mmap import check_dataset, read_header
from lightning_megatron.data.samples.base import Objective, Part, Samples
from lightning_megatron.data.samples.blend import BlendedSamples, Mixture, SplitRequest, mix, num_samples_of_one_pass
from lightning_megatron.data.samples.built_once import SampleOrder, build_once
from lightning_megatron.data.samples.split import canonical_split

__all__ = ["SampleOrder", "build", "check_request", "open_samples"]

_log = logging.getLogger(__name__)

_LAYOUT = 1
"""Of the files in a folder; a change makes the old folders unknown."""


def check_request(request: SplitRequest) -> int:
    """Samples in one pass over the split, after checking every dataset; reads ``.idx`` only, and writes nothing.

    Raises:
        DataError: If a dataset is missing or damaged, or has not one sample for this split; the message names it.
    """
    for source in request.sources:
        read_header(source.prefix)
        _check_once(source.prefix, _identity(source.prefix))
    return num_samples_of_one_pass(request.sources, _counts(request))


def build(request: SplitRequest, index_cache: str | None) -> SampleOrder:
    """The order of the samples, after building on disk whatever is not there yet.

    Args:
        request: Which samples.
        index_cache: Folder for all indices; None for one next to each dataset.

    Raises:
        DataError: If a folder cannot be written.
    """
    return _built(request, index_cache, elsewhere=False)


def open_samples(request: SplitRequest, index_cache: str | None) -> Samples:
    """The samples; a machine that does not see what ``build`` wrote on another one builds it for itself.

    Args:
        request: Which samples.
        index_cache: As for ``build``.

    Raises:
        DataError: If a dataset is missing on this machine, or a folder cannot be written.
    """
    for source in request.sources:
        read_header(source.prefix)
    order = _built(request, index_cache, elsewhere=True)
    folder = _folder_of(request, index_cache)
    if len(request.sources) == 1:
        return request.objective.open(request.part(request.sources[0], request.num_samples), folder)
    openers: list[Callable[[], Samples]] = []
    for part in _parts(request, Mixture.load(folder)):
        _built_part(request.objective, part, index_cache)
        openers.append(partial(request.objective.open, part, _folder_of_part(request.objective, part, index_cache)))
    return BlendedSamples(folder, openers, order.num_samples, order.fingerprint)


@lru_cache(maxsize=4096)
def _check_once(prefix: str, identity: object) -> None:
    """All splits of a run have the same datasets, and an index may have gigabytes."""
    check_dataset(prefix)


def _counts(request: SplitRequest) -> list[int]:
    return [request.objective.count(request.part(source, None)) for source in request.sources]


def _parts(request: SplitRequest, mixture: Mixture) -> list[Part]:
    needed = mixture.part_samples.tolist()
    return [request.part(source, samples or None) for source, samples in zip(request.sources, needed, strict=True)]


def _built(request: SplitRequest, index_cache: str | None, elsewhere: bool) -> SampleOrder:
    """The order of the samples, which are on disk then.

    Args:
        request: Which samples.
        index_cache: Folder for all indices.
        elsewhere: Whether another process has built all of it before.
    """
    if len(request.sources) == 1:
        part = request.part(request.sources[0], request.num_samples)
        return _built_part(request.objective, part, index_cache, elsewhere)

    def write(staging: str) -> SampleOrder:
        if elsewhere:
            _warn_of_building_again(staging)
        mixture = mix(request.sources, _counts(request), request.num_samples)
        orders = [_built_part(request.objective, part, index_cache) for part in _parts(request, mixture)]
        mixture.save(staging)
        digest = hashlib.sha256(repr([order.fingerprint for order in orders]).encode())
        digest.update(mixture.dataset_index[:4096].tobytes())
        return SampleOrder(num_samples=len(mixture.dataset_index), fingerprint=digest.hexdigest()[:16])

    subject = f"the blend of {', '.join(source.prefix for source in request.sources[:3])}"
    return build_once(_folder_of(request, index_cache), write, subject)


def _built_part(objective: Objective, part: Part, index_cache: str | None, elsewhere: bool = False) -> SampleOrder:
    def write(staging: str) -> SampleOrder:
        if elsewhere:
            _warn_of_building_again(staging)
        samples = objective.open(part, staging)
        return SampleOrder(num_samples=len(samples), fingerprint=samples.fingerprint)

    return build_once(_folder_of_part(objective, part, index_cache), write, part.prefix)


def _warn_of_building_again(staging: str) -> None:
    _log.warning(
        "An index that another process has built is not to be seen in %s on this machine and is built again; set"
        " index_cache to a folder that all machines share to save the time.",
        os.path.dirname(staging),
    )


def _folder_of(request: SplitRequest, index_cache: str | None) -> str:
    if len(request.sources) == 1:
        part = request.part(request.sources[0], request.num_samples)
        return _folder_of_part(request.objective, part, index_cache)
    key = (request.objective.index_key, canonical_split(request.split), request.name, request.seed, request.num_samples)
    sources = [(_identity(source.prefix), source.weight) for source in request.sources]
    names = (request.objective.name, request.name, "blend")
    return _folder(names, (key, sources), request.sources[0].prefix, index_cache)


def _folder_of_part(objective: Objective, part: Part, index_cache: str | None) -> str:
    key = (objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples)
    return _folder((objective.name, part.name), (key, _identity(part.prefix)), part.prefix, index_cache)


def _folder(names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_LAYOUT, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _identity(prefix: str) -> tuple[object, ...]:
    """Tells a dataset from the one that was at the same place before."""
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))
