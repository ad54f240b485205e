"""Hashes of what data holds, of a few places of it: a resumed run notices data that was replaced.

Two datasets may have equal numbers of samples, and documents of equal lengths. Reading a few places takes milliseconds
for terabytes, and is equal for files that were moved or copied. A change of single documents goes unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_megatron.data.indexed import IndexedDataset

_PLACES = 16
"""Places that are read of the datasets of a blend together; at least one of each."""
_TOKENS = 64
"""Tokens, or lengths, that are read at a place."""
_BYTES = 256
"""Bytes of a file that are read at a place."""
_SEPARATOR = "/"
"""Between the two parts of a fingerprint."""
_PLAIN_VALUES = (bool, bytes, complex, float, int, str, type(None))


def with_contents(order: str, contents: str) -> str:
    """Fingerprint of an order of samples, and of what these hold if that is known."""
    if not contents:
        return order
    return f"{order}{_SEPARATOR}{contents}"


def is_same(saved: object, own: str) -> bool:
    """Whether the fingerprint in a checkpoint is that of this run; one of an older version has the order alone."""
    if isinstance(saved, str) and _SEPARATOR not in saved:
        own, *_ = own.split(_SEPARATOR)
    return saved == own


def hash_of_indexed(datasets: Iterable[IndexedDataset], number: int = 1) -> str:
    """Hash of lengths and tokens at a few places of each dataset; equal in all formats and dtypes of their files.

    Args:
        datasets: Read one after the other: a blend may have more than the files that a process may open.
        number: How many they are.
    """
    digest = hashlib.sha256()
    places = max(1, _PLACES // number)
    for dataset in datasets:
        for array in (dataset.lengths, dataset.tokens):
            digest.update(f"{len(array)} ".encode())
            for begin in _places(len(array), places):
                values = array[begin : begin + _TOKENS].astype(np.int64)
                digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def hash_of_files(paths: Sequence[Path]) -> str:
    """Hash of a few bytes of each file, or of a few of many files."""
    digest = hashlib.sha256()
    chosen = [paths[place] for place in _places(len(paths), _PLACES)]
    places = max(1, _PLACES // len(chosen))
    for path in chosen:
        with open(path, "rb") as file:
            for begin in _places(path.stat().st_size, places):
                file.seek(begin)
                digest.update(file.read(_BYTES))
    return digest.hexdigest()[:16]


def hash_of_rows(dataset: object) -> str:
    """Hash of a few rows of a dataset that reading them cannot change; empty for those of other classes.

    Lists, tuples, torch's ``TensorDataset`` and the tables of Hugging Face datasets are read. A dataset of the user's
    own may count its reads, draw random numbers in them, or take seconds for one.
    """
    rows: list[Any]
    if type(dataset) in (list, tuple):
        items: Any = dataset
        rows = [items[place] for place in _places(len(items), _PLACES)]
    elif type(dataset) is TensorDataset:
        tensors = dataset.tensors
        rows = [[tensor[place] for tensor in tensors] for place in _places(len(dataset), _PLACES)]
    elif isinstance(getattr(dataset, "_fingerprint", None), str):
        # Not by index: formats and transforms of the user's would run.
        table = getattr(getattr(dataset, "data", None), "table", None)
        if table is None:
            return ""
        rows = [table.slice(place, 1).to_pylist() for place in _places(len(table), _PLACES)]
    else:
        return ""
    digest = hashlib.sha256()
    for row in rows:
        _update(digest, row)
    return digest.hexdigest()[:16]


def _places(length: int, number: int) -> list[int]:
    """Up to ``number`` indices below ``length``, at equal distances, the first and the last among them."""
    if length == 0:
        return []
    spread: NDArray[np.int64] = np.linspace(0, length - 1, number).astype(np.int64)
    places: list[int] = np.unique(spread).tolist()
    return places


def _update(digest: Any, value: object) -> None:
    """Add a value of a row; of a class that has no plain content, its name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _update(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} ".encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, Tensor) and value.layout == torch.strided:
        digest.update(repr(tuple(value.shape)).encode())
        numbers = value.detach().cpu().reshape(-1).contiguous()
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(repr(value.shape).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, _PLAIN_VALUES):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__name__.encode())
