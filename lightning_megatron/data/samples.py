"""Samples of one split in a fixed order: contract of objectives and loaders, splits, index folders built once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.errors import ConfigError, DataError

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

    @property
    @abstractmethod
    def name(self) -> str:
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
            folder: Where the index is, or is to be written if this is empty; ``""`` keeps it in memory.
        """


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


_log = logging.getLogger(__name__)

_MANIFEST = "index.json"
_STAGING = ".building-"
_HAS_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_QUIET_WAIT_S = 5.0
_LONGEST_WAIT_S = 7200.0
_LONGEST_POLL_S = 1.0
_ABANDONED_S = 7 * 86400.0
"""Where locks do not tell whether the builder lives."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """An order of samples that exists on disk."""

    num_samples: int
    """Samples in it: at least as many as were requested."""
    fingerprint: str
    """Equal for equal orders of equal documents; a resumed run finds out by it whether it goes on in the same order."""


def build_once(folder: str, write: Callable[[str], SampleOrder], subject: str) -> SampleOrder:
    """What ``folder`` holds, after building it if it does not exist or is damaged.

    Args:
        folder: Absolute path; its name stands for its content.
        write: Fills an empty folder, and says what is in it.
        subject: What the index is of, for messages.

    Raises:
        DataError: If it cannot be written, or another process has been building it for hours.
    """
    order = _read_order(folder)
    if order is not None:
        return order
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with _lock(folder) as locked:
            order = _read_order(folder)
            if order is None:
                _log.info("Building the index of %s in %s.", subject, folder)
                order = _build(folder, write, locked)
            return order
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache to a"
            " folder that can be written and has room"
        ) from error


def open_array(folder: str, name: str) -> NDArray[Any]:
    """Map ``name.npy`` of a folder into memory.

    Raises:
        DataError: If it is damaged, or not there any more: a run opens its index again for each validation.
    """
    path = os.path.join(folder, f"{name}.npy")
    try:
        # A plain view of the map: slices of a numpy.memmap cost more than the copies that are made of them.
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is not there any more, though the run is not over; start the run again, which builds the index"
            " anew, and keep its folder as long as it lasts"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is no index ({error}): damaged; delete its folder") from error


def _read_order(folder: str) -> SampleOrder | None:
    """What a folder says of itself; None if there is none, or its files are not as they were written."""
    if not os.path.isdir(folder):
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(os.path.join(folder, _MANIFEST), encoding="utf-8") as stream:
            manifest = json.load(stream)
        if all(os.path.getsize(os.path.join(folder, name)) == size for name, size in manifest["sizes"].items()):
            return SampleOrder(**manifest["order"])
    _log.warning("The index %s is damaged and is not used.", folder)
    return None


def _build(folder: str, write: Callable[[str], SampleOrder], locked: bool) -> SampleOrder:
    parent, name = os.path.split(folder)
    _remove_leftovers(parent, name if locked else None)
    staging, damaged = (os.path.join(parent, f"{_STAGING}{name}-{uuid.uuid4().hex[:12]}") for _ in range(2))
    os.mkdir(staging)
    try:
        order = write(staging)
        sizes = {file: os.path.getsize(os.path.join(staging, file)) for file in os.listdir(staging)}
        with open(os.path.join(staging, _MANIFEST), "w", encoding="utf-8") as stream:
            json.dump({"order": asdict(order), "sizes": sizes}, stream, indent=1)
        if os.path.isdir(folder) and _read_order(folder) is None:
            os.rename(folder, damaged)
        try:
            os.rename(staging, folder)
        except OSError:
            # Without locks another job may have built the same in the meantime; its files are as good.
            if _read_order(folder) is None:
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)
    return order


def _remove_leftovers(parent: str, locked_name: str | None) -> None:
    """What killed jobs left of this index and of others."""
    for entry in os.scandir(parent):
        if entry.name.startswith(_STAGING):
            name = entry.name.removeprefix(_STAGING).rpartition("-")[0]
            with contextlib.suppress(OSError):  # whatever cannot be removed is in nobody's way
                old = time.time() - entry.stat().st_mtime > _ABANDONED_S
                if old or name == locked_name or _nobody_builds(parent, name):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _nobody_builds(parent: str, name: str) -> bool:
    """Whether the lock of another folder is free; False where there are no locks."""
    path = _lock_path(parent, name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked = _try_lock(descriptor)
        if locked is False or not _is_at(descriptor, path):
            return False
        os.unlink(path)
        return locked is True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(folder: str) -> Iterator[bool]:
    """Hold the lock of ``folder``, or go on without where the file system has none: False."""
    parent, name = os.path.split(folder)
    path = _lock_path(parent, name)
    waiting = _Waiting(folder)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while not (locked := _try_lock(descriptor)) and locked is not None:
                waiting.wait(os.pread(descriptor, 200, 0).decode(errors="replace") or "another process")
            if locked is None:
                _log.warning("%s has no file locks; jobs that start at once may build the same index twice.", parent)
            elif not _is_at(descriptor, path):
                continue  # whoever had it is done and has removed it
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                yield locked is not None
            finally:
                # Removed while it is held, so that whoever waits for it sees that it is a lock no more.
                if _is_at(descriptor, path):
                    os.unlink(path)
            return
        finally:
            os.close(descriptor)


def _lock_path(parent: str, name: str) -> str:
    return os.path.join(parent, f".{name}.lock")


def _try_lock(descriptor: int) -> bool | None:
    """Whether it is ours now; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HAS_NO_LOCKS:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


class _Waiting:
    """Waits for whoever builds a folder, says so when it takes long, and gives up when it takes too long."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin = time.monotonic()
        self._poll = 0.01
        self._said = False

    def wait(self, holder: str) -> None:
        """Sleep for a moment."""
        waited = time.monotonic() - self._begin
        if waited > _LONGEST_WAIT_S:
            raise DataError(
                f"the index {self._folder} has been in the making by {holder} for {waited:.0f} s, the limit is"
                f" {_LONGEST_WAIT_S:.0f} s; end that process if it hangs, or set index_cache to another folder"
            )
        if waited > _QUIET_WAIT_S and not self._said:
            self._said = True
            _log.warning("Waiting for %s, which builds the index %s.", holder, self._folder)
        time.sleep(self._poll)
        self._poll = min(2 * self._poll, _LONGEST_POLL_S)
