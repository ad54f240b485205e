"""Samples of one split in a fixed order: what objectives and loaders agree on, splits, and index folders built once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.files import staged

_log = logging.getLogger(__name__)

Rows: TypeAlias = dict[str, Tensor]
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
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """The split."""
    seed: int
    """Of the order, and of what is drawn for each sample."""
    num_samples: int | None
    """Samples that are needed, over as many passes as it takes; None for one pass."""


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
    def open(self, part: Part, folder: str) -> Samples:
        """The samples of ``part``: at least ``num_samples`` of them.

        Args:
            part: Which.
            folder: Where the index is, or is to be written if this is empty.
        """


# ---- folders that are built once ------------------------------------------------------------------------------------

_MANIFEST = "index.json"
_QUIET_WAIT_S = 5.0
_LONGEST_WAIT_S = 7200.0


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """An order of samples that exists on disk."""

    num_samples: int
    """Samples in it: at least as many as were requested."""
    fingerprint: str
    """Equal for equal orders of equal documents; a resumed run finds out by it whether it goes on in the same order."""


@dataclass(frozen=True, kw_only=True)
class SavedArrays:
    """Arrays that are saved as ``FIELD.npy`` each, and mapped into memory when they are loaded."""

    def save(self, folder: str) -> None:
        """Write to ``folder``."""
        for field in fields(self):
            np.save(os.path.join(folder, f"{field.name}.npy"), getattr(self, field.name))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Map the files of ``folder`` into memory.

        Raises:
            DataError: As ``open_array``.
        """
        return cls(**{field.name: open_array(folder, field.name) for field in fields(cls)})


def open_array(folder: str, name: str) -> NDArray[Any]:
    """Map ``name.npy`` of a folder into memory.

    Raises:
        DataError: If it is damaged, or not there any more: a run opens its index again for each validation.
    """
    path = os.path.join(folder, f"{name}.npy")
    try:
        # A plain view of the map: slices of a numpy.memmap cost more than the copies that are made of them.
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read ({error}): removed or damaged; start the run again, which builds it anew"
        ) from error


def build_once(folder: str, write: Callable[[str], SampleOrder], subject: str) -> SampleOrder:
    """What ``folder`` holds, after one of the processes that want it has built it if it is missing or damaged.

    Its ``index.json`` has the sizes of its files, so that damage is noticed. Whoever builds holds a lock, which ends
    with the process, and the others wait.

    Args:
        folder: Absolute path; its name stands for its content.
        write: Fills an empty folder, and says what is in it.
        subject: What the index is of, for messages.

    Raises:
        DataError: If it cannot be written, or another process has been building it for hours.
    """
    path = Path(folder)
    order = _read_order(path)
    if order is not None:
        return order
    lock_file = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(lock_file, path):
            order = _read_order(path)
            if order is None:
                _log.info("Building the index of %s in %s.", subject, folder)
                order = _build(path, write)
            # Whoever opened the file before finds a whole folder when the lock is released.
            lock_file.unlink(missing_ok=True)
            return order
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache"
        ) from error


def _build(path: Path, write: Callable[[str], SampleOrder]) -> SampleOrder:
    with staged(path.parent, path.name, error=DataError) as hidden:
        folder = hidden / path.name
        folder.mkdir()
        order = write(str(folder))
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        manifest = json.dumps({"order": asdict(order), "sizes": sizes}, indent=1)
        (folder / _MANIFEST).write_text(manifest, encoding="utf-8")
    return order


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


def _read_order(folder: Path) -> SampleOrder | None:
    """What a folder says of itself; None if there is none, or its files are not as they were written."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items()):
            return SampleOrder(**manifest["order"])
    _log.warning("The index %s is damaged and is not used.", folder)
    return None
