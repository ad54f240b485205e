"""Samples of one split in a fixed order: objectives, splits, blends, and folders of indices that are built once.

Datasets of a blend are taken in turn such that after every sample each has come as close to its share as it can; the
greedy rule is the engine's (megatron-core 0.16.1, datasets/helpers.cpp:build_blending_indices).

Each dataset's index is in a folder of its own, and so is the order in which a blend takes datasets; each is built once
for all jobs. A folder's name covers everything that determines its content, with sizes and times of the dataset's
files: the engine's own key has only the path (datasets/megatron_dataset.py), so after preprocessing again under the
same name it would use the index of the old file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from lightning_megatron.data.indexed import check_dataset, convert_dataset, is_old_format, open_dataset
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.files import staged

_log = logging.getLogger(__name__)

Rows: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a batch on the host, each with one row per sample: [rows, ...]."""


class Samples(Protocol):
    """The samples of one split in a fixed order; sample ``i`` is the same on every rank, in every worker and run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order; a resumed run finds out by it whether it goes on in its own."""

    def __len__(self) -> int:
        """Samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If what the samples are made of is damaged.
        """


# ---- splits ---------------------------------------------------------------------------------------------------------

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
    is_read = all(map(_WEIGHT.fullmatch, parts)) and any(map(float, parts))
    if not is_read or len(parts) > len(SPLIT_NAMES):
        raise ConfigError(f"split={split!r} must be one to three weights like 949,50,1 of digits and points, not all 0")
    train, valid, test = [float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts))
    return train, valid, test


def canonical_split(split: str) -> str:
    """The same weights in the only spelling that the engine cannot misread."""
    return ",".join(np.format_float_positional(weight, trim="-") for weight in parse_split(split))


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, range]:
    """Sequences of each split; an empty range where the weight is 0 or too small for one sequence.

    The same floating-point steps as the engine, so that the bounds agree to the last document (megatron-core 0.16.1,
    convert_split_vector_to_split_matrix and blended_megatron_dataset_builder.py:_build_megatron_dataset_splits).
    """
    weights = np.array(parse_split(split), dtype=np.float64)
    ranges: dict[SplitName, range] = {}
    low = 0.0
    for name, fraction in zip(SPLIT_NAMES, (weights / weights.sum()).tolist(), strict=True):
        high = low + fraction
        ranges[name] = range(int(round(low * num_sequences)), int(round(high * num_sequences)))
        low = high
    return ranges


# ---- objectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents of one dataset that belong to one split, and how many samples of them are asked for."""

    prefix: str
    """Dataset, without suffix."""
    weight: float | None = None
    """Its share of a blend before normalisation; None if datasets are taken in proportion to their sizes."""
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """The split."""
    seed: int
    """Of the order, and of what is drawn for each sample."""
    num_samples: int | None
    """Samples that are needed, of a blend those of all its parts, over as many passes as it takes; None for one."""


class Objective(ABC):
    """How samples are cut out of documents for one kind of model. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """``gpt``, ``bert`` or ``t5``."""

    @property
    @abstractmethod
    def index_key(self) -> str:
        """What of this objective the index (which documents, in which order) depends on, as text for a cache's name."""

    @property
    @abstractmethod
    def largest_token(self) -> int:
        """The largest id that samples contain besides those of the documents; -1 if there are none."""

    @abstractmethod
    def count(self, part: Part) -> int:
        """Samples in one pass over the documents of ``part``; reads ``.idx`` only, and ignores ``num_samples``.

        Raises:
            DataError: If there is not even one, with the rule and the fix: the engine would wait for ever.
        """

    @abstractmethod
    def lay_out(self, part: Part) -> SavedArrays:
        """The index of ``part``: at least ``num_samples`` samples."""

    @abstractmethod
    def open(self, part: Part, folder: str) -> Samples:
        """The samples of ``part`` by the index that was saved to ``folder``."""


class SavedArrays:
    """Arrays that are saved as ``FIELD.npy`` each, and mapped into memory when loaded; subclasses are dataclasses."""

    folder = ""
    """Where they were loaded from."""

    def save(self, folder: str) -> None:
        """Write to ``folder``."""
        for field in fields(self):  # type: ignore[arg-type]
            np.save(os.path.join(folder, f"{field.name}.npy"), getattr(self, field.name))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Map the files of ``folder`` into memory.

        Raises:
            DataError: If one is damaged, or not there any more: a run opens its index again for each validation.
        """
        arrays = {}
        for field in fields(cls):  # type: ignore[arg-type]
            path = os.path.join(folder, f"{field.name}.npy")
            try:
                # A plain view of the map: slices of a numpy.memmap cost more than the copies that are made of them.
                arrays[field.name] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(
                    f"{path} cannot be read ({error}): removed or damaged; start the run again, which builds it anew"
                ) from error
        loaded = cls(**arrays)
        loaded.__dict__["folder"] = folder
        return loaded

    def __getstate__(self) -> str | dict[str, Any]:
        """Maps of files do not travel to other processes, which open them again."""
        return self.folder or self.__dict__

    def __setstate__(self, state: str | dict[str, Any]) -> None:
        self.__dict__.update(state if isinstance(state, dict) else vars(self.load(state)))

    def fingerprint(self, facts: str) -> str:
        """Of ``facts`` and the beginning of each array: any difference in an order reshuffles all of it."""
        digest = hashlib.sha256(facts.encode())
        for field in fields(self):  # type: ignore[arg-type]
            digest.update(np.ascontiguousarray(getattr(self, field.name)[:4096]).tobytes())
        return digest.hexdigest()[:16]


# ---- blends ---------------------------------------------------------------------------------------------------------

MAX_DATASETS = 32766
"""The engine numbers datasets in 16 bits."""
_SURPLUS = 0.005
"""Samples that Megatron lays out of each dataset beyond its share; they may cost a pass more, and so change the order
(megatron-core 0.16.1, blended_megatron_dataset_config.py:mid_level_dataset_surplus)."""
_MAX_OPEN = 64
"""Datasets of a blend that a process holds open: each takes about five file descriptors, of 1,024 in all."""


def parse_blend(data_path: str | Sequence[str | float]) -> list[tuple[str, float | None]]:
    """The prefixes of the datasets that the user names, with their weights; None where sizes decide.

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
    blend = [pair for pair in zip(prefixes, weights or [None] * len(prefixes), strict=True) if pair[1] != 0]
    if not 1 <= len(blend) <= MAX_DATASETS:
        raise ConfigError(f"data_path={shown} gives {len(blend)} datasets a weight, expected 1 to {MAX_DATASETS}")
    return blend


def _number(item: object) -> float | None:
    """What an item is worth as a number; None if it is none."""
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class Mixture(SavedArrays):
    """The order of datasets in a blend."""

    dataset_index: NDArray[np.int16]
    """The dataset of each sample: [samples]."""
    sample_index: NDArray[np.int64]
    """Its number in that dataset: [samples]."""
    part_samples: NDArray[np.int64]
    """Samples that have to be laid out of each dataset, 0 for one pass: [datasets]."""

    def shares(self, parts: Sequence[Part]) -> list[Part]:
        """What each of ``parts`` gives to the blend."""
        return [replace(p, num_samples=n or None) for p, n in zip(parts, self.part_samples.tolist(), strict=True)]


def mix(weights: Sequence[float | None], counts: Sequence[int], num_samples: int | None) -> Mixture:
    """The order in which several datasets are taken.

    It equals the engine's where that has one. The engine takes no weights for one pass, and no more than one pass
    without weights; and it fails where its greedy rule takes more of a dataset than it has laid out.

    One pass takes no sample twice. Without weights it has all; with weights it ends where the first dataset has none
    left for its share, as in ``interleave_datasets`` of Hugging Face datasets (``first_exhausted``). No dataset runs
    out before: of N samples the greedy rule takes at most w * (N - 1) + 1 from a dataset of weight w.

    Args:
        weights: Of the datasets; all None to take them in proportion to their sizes.
        counts: Samples in one pass over each.
        num_samples: Samples that are needed, over as many passes as it takes; None for one pass.
    """
    from megatron.core.datasets import helpers

    is_weighted = weights[0] is not None
    shares = _normalized(weights if is_weighted else counts)
    laid_out = np.zeros(len(weights), dtype=np.int64)
    if num_samples is None:
        size = min(map(int, np.asarray(counts) / shares)) if is_weighted else sum(counts)
    elif not is_weighted:
        size = num_samples
    else:
        # Megatron rounds the samples of each dataset up, so there are a few more than requested.
        rounded = [math.ceil(num_samples * share) for share in shares]
        size = sum(rounded)
        laid_out[:] = [math.ceil(samples * (1 + _SURPLUS)) for samples in rounded]
        shares = _normalized(shares)  # twice, as in Megatron: the last bit may decide who comes first
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    if num_samples is None and not is_weighted:
        helpers.build_exhaustive_blending_indices(dataset_index, sample_index, list(counts), len(weights))
    else:
        helpers.build_blending_indices(dataset_index, sample_index, shares, len(weights), size, False)
    part_samples = np.maximum(laid_out, np.bincount(dataset_index, minlength=len(weights)))
    part_samples[part_samples <= np.asarray(counts)] = 0
    return Mixture(dataset_index=dataset_index, sample_index=sample_index, part_samples=part_samples)


def _normalized(weights: Sequence[float | None]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / array.sum()).tolist()
    return normalized


class BlendedSamples:
    """Several datasets as one; each is opened when a sample of it is read, and only some are open at a time.

    Args:
        mixture: The order of datasets.
        openers: Open one dataset each; picklable.
        fingerprint: Of the order of datasets, and of the samples in each.
    """

    def __init__(self, mixture: Mixture, openers: Sequence[Callable[[], Samples]], fingerprint: str) -> None:
        self._mixture, self._openers, self.fingerprint = mixture, openers, fingerprint
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

    def _dataset(self, number: int) -> Samples:
        if number not in self._open:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)
            self._open[number] = self._openers[number]()
        self._open.move_to_end(number)
        return self._open[number]


# ---- which index ----------------------------------------------------------------------------------------------------

_LAYOUT = 1
"""Of the files in a folder; a change makes the old folders unknown."""


def in_mmap(prefix: str, index_cache: str | None) -> str:
    """The dataset in today's format: itself, or what became of one of Megatron's older formats (cached, lazy).

    Such a dataset is converted once for all jobs, beside the indices that are made of it, and a warning says so.

    Args:
        prefix: A dataset of any format.
        index_cache: Folder for all indices; None for one next to each dataset.

    Raises:
        DataError: If it is damaged, or the folder cannot be written.
    """
    if not is_old_format(prefix):
        return prefix
    folder, name = _folder(("mmap",), _identity(prefix), prefix, index_cache), Path(prefix).name

    def write(staging: str) -> str:
        _log.warning("%s is in Megatron's old cached/lazy format; converting it into %s, once", prefix, folder)
        for note in convert_dataset(prefix, os.path.join(staging, name))[1]:
            _log.warning("%s", note)
        return "as stored"

    build_once(folder, write, prefix)
    return os.path.join(folder, name)


def check_parts(objective: Objective, parts: Sequence[Part], *, are_used: bool) -> None:
    """Check the datasets of a split; reads ``.idx`` only, and writes nothing.

    Args:
        objective: How samples are cut out of documents.
        parts: One for each dataset.
        are_used: Whether there must be samples in each.

    Raises:
        DataError: If a dataset is missing or damaged, or has not one sample for a split that is used; it is named.
    """
    for part in parts:
        open_dataset(part.prefix)
        _check_once(part.prefix, _identity(part.prefix))
        if are_used:
            objective.count(part)


@lru_cache(maxsize=4096)
def _check_once(prefix: str, identity: object) -> None:
    """All splits of a run have the same datasets, and an index may have gigabytes."""
    check_dataset(prefix)


def open_samples(objective: Objective, parts: Sequence[Part], index_cache: str | None) -> Samples:
    """The samples of a split, after building on disk whatever this machine does not see there.

    Args:
        objective: How samples are cut out of documents.
        parts: One for each dataset of the blend, which differ in prefix and weight.
        index_cache: Folder for all indices; None for one next to each dataset.

    Raises:
        DataError: If a dataset is missing on this machine, or a folder cannot be written.
    """
    for part in parts:
        open_dataset(part.prefix)
    first = parts[0]
    if len(parts) == 1:
        return objective.open(first, _built(objective, first, index_cache)[0])

    def write(staging: str) -> str:
        mixture = mix([part.weight for part in parts], list(map(objective.count, parts)), first.num_samples)
        mixture.save(staging)
        fingerprints = [_built(objective, part, index_cache)[1] for part in mixture.shares(parts)]
        digest = hashlib.sha256(repr(fingerprints).encode())
        digest.update(mixture.dataset_index[:4096].tobytes())
        return digest.hexdigest()[:16]

    identity = (_key(objective, first), [(_identity(part.prefix), part.weight) for part in parts])
    folder = _folder((objective.name, first.name, "blend"), identity, first.prefix, index_cache)
    fingerprint = build_once(folder, write, f"the blend of {', '.join(part.prefix for part in parts[:3])}")
    mixture = Mixture.load(folder)
    shares = [(part, _built(objective, part, index_cache)[0]) for part in mixture.shares(parts)]
    return BlendedSamples(mixture, [partial(objective.open, *share) for share in shares], fingerprint)


def _built(objective: Objective, part: Part, index_cache: str | None) -> tuple[str, str]:
    """The folder of an index that is on disk now, and the fingerprint of its samples."""

    def write(staging: str) -> str:
        objective.lay_out(part).save(staging)
        return objective.open(part, staging).fingerprint

    identity = (_key(objective, part), _identity(part.prefix))
    folder = _folder((objective.name, part.name), identity, part.prefix, index_cache)
    return folder, build_once(folder, write, part.prefix)


def _key(objective: Objective, part: Part) -> tuple[object, ...]:
    return objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples


def _folder(names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_LAYOUT, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _identity(prefix: str) -> tuple[object, ...]:
    """Tells a dataset from the one that was at the same place before."""
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))


# ---- folders that are built once ------------------------------------------------------------------------------------

_MANIFEST = "index.json"
_QUIET_WAIT_S = 5.0
_LONGEST_WAIT_S = 7200.0


def build_once(folder: str, write: Callable[[str], str], subject: str) -> str:
    """The fingerprint of what ``folder`` holds, after one of the processes that want it has built what is not there.

    Its ``index.json`` has the sizes of its files, so that damage is noticed. Whoever builds holds a lock, which ends
    with the process, and the others wait.

    Args:
        folder: Absolute path; its name stands for its content.
        write: Fills an empty folder, and gives its content's fingerprint: equal for equal orders of equal documents.
        subject: What the index is of, for messages.

    Raises:
        DataError: If it cannot be written, or another process has been building it for hours.
    """
    path = Path(folder)
    if (fingerprint := _read_fingerprint(path)) is not None:
        return fingerprint
    lock_file = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(lock_file, path):
            fingerprint = _read_fingerprint(path)
            if fingerprint is None:
                _log.info("Building the index of %s in %s.", subject, folder)
                fingerprint = _build(path, write)
            # Whoever opened the file before finds a whole folder when the lock is released.
            lock_file.unlink(missing_ok=True)
            return fingerprint
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache"
        ) from error


def _build(path: Path, write: Callable[[str], str]) -> str:
    with staged(path.parent, path.name, error=DataError) as hidden:
        folder = hidden / path.name
        folder.mkdir()
        fingerprint = write(str(folder))
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        manifest = json.dumps({"order": {"fingerprint": fingerprint}, "sizes": sizes}, indent=1)
        (folder / _MANIFEST).write_text(manifest, encoding="utf-8")
    return fingerprint


def _lock(file: Path, path: Path) -> AbstractContextManager[object]:
    """Hold ``file``, the lock of the folder ``path``.

    Raises:
        DataError: If somebody else holds it for hours.
    """
    for patience in (_QUIET_WAIT_S, _LONGEST_WAIT_S):
        try:
            return FileLock(file, mode=0o666).acquire(timeout=patience)
        except Timeout:
            _log.warning("Waiting for another process, which builds the index %s.", path)
    raise DataError(
        f"the index {path} has been in the making by another process for more than {_LONGEST_WAIT_S:.0f} s; end that"
        f" process if it hangs, delete {file} if there is none, or set index_cache to another folder"
    )


def _read_fingerprint(folder: Path) -> str | None:
    """What a folder says of itself; None if there is none, or its files are not as they were written."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items()):
            return str(manifest["order"]["fingerprint"])
    _log.warning("The index %s is damaged and is not used.", folder)
    return None
