"""Weight files of a Hugging Face model directory: safetensors and pickles.

They are memory-mapped. Mapped pages count as memory of the process until the file is closed, so that a rank would come
to hold its shard twice: a file is therefore reopened after some megabytes. (Reopening it for each tensor parses the
header too often: reading 361 MB took 0.17 s instead of 0.12.)
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, save_file
from torch import Tensor

from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.convert.source import Stored
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.hub import WEIGHT_FILES
from lightning_megatron.storage.paths import sync

Value = TypeVar("Value")

(WEIGHTS_FILE, INDEX_FILE), _PICKLED_FILES = WEIGHT_FILES
CONFIG_FILE = "config.json"
ENTRY_FILES = (WEIGHTS_FILE, INDEX_FILE, *_PICKLED_FILES)
"""Files that ``from_pretrained`` looks for first."""
SHARD_FILE = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_MAX_MAPPED_BYTES = 16 << 20
"""Bytes to read from a mapped file before it is reopened."""


class WeightFiles:
    """Lazily read tensors of one model directory.

    Args:
        tensors: Tensors by name; ``location`` is the safetensors file, or the tensor itself from a mapped pickle.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors = tensors
        self._file: Path | None = None
        self._opened: Any = None
        self._mapped = 0

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """Read a slice of a tensor; may be a view of the mapped file, so copy before keeping it.

        Args:
            name: Name of the tensor.
            box: Slice of each axis; axes without one are read in full, and further ones, of a scalar, are ignored.

        Raises:
            CheckpointError: If the file cannot be read or is truncated.
        """
        stored = self.tensors[name]
        box = box[: len(stored.shape)]
        if isinstance(stored.location, Tensor):
            return stored.location[box]
        file: Path = stored.location
        with _damage_as_errors(file):
            if self._file != file or self._mapped > _MAX_MAPPED_BYTES:
                self._opened = safe_open(file, framework="pt")
                self._file = file
                self._mapped = 0
            self._mapped += stored.num_bytes
            part: Tensor = self._opened.get_slice(name)[box]
            return part

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same shape and values."""
        whole = (slice(None),)
        return torch.equal(self.read(one, whole), self.read(other, whole))


def add_tensor(
    found: dict[str, Value],
    name: str,
    value: Value,
    where: Path | str,
) -> None:
    """Add what is known of a tensor to ``found``, by the one name that it has in the model.

    Args:
        found: The tensors so far.
        name: Name of the tensor.
        value: What is known of it.
        where: The files, for messages.

    Raises:
        CheckpointError: If another tensor has this name: nothing says which of the two is meant.
    """
    if name in found:
        raise CheckpointError(
            f"{where}: expected one tensor that is {name!r}, got two; remove the one that is not meant, or fetch the "
            "files again"
        )
    found[name] = value


def has_weights(directory: Path) -> bool:
    """Whether the directory has weight files that transformers would load."""
    return any((directory / name).is_file() for name in ENTRY_FILES)


def directory_of(file: Path) -> Path | None:
    """Model directory of a weight file or index; None if ``file`` is neither."""
    is_part = file.name in ENTRY_FILES or SHARD_FILE.fullmatch(file.name) is not None
    return file.parent if is_part and file.is_file() and has_weights(file.parent) else None


def open_weights(directory: str | Path) -> WeightFiles:
    """Open the weight files of ``directory`` by their headers, safetensors before pickles, as transformers does.

    Raises:
        CheckpointError: If there are none, or one is missing, damaged, truncated or holds other objects than tensors,
            or if two files have a tensor of the same name.
    """
    directory = Path(directory)
    for (single, index), read in zip(WEIGHT_FILES, (read_safetensors, _read_pickled), strict=True):
        if (directory / single).is_file():
            files = [directory / single]
        elif (directory / index).is_file():
            files = _indexed_files(directory / index)
        else:
            continue
        tensors: dict[str, Stored] = {}
        for file in files:
            for name, stored in read(file).items():
                add_tensor(tensors, name, stored, directory)
        return WeightFiles(tensors)
    raise CheckpointError(
        f"model directory {directory}: expected one of {', '.join(ENTRY_FILES)} there, got none; save weights with "
        "save_pretrained, or train from random weights with pretrained=False"
    )


def _indexed_files(index: Path) -> list[Path]:
    """Files named by an index; raises unless all exist and are in the directory of the index."""
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not names:
            raise ValueError("it names none")
        for name, file in names.items():
            if not re.fullmatch(r"\w[\w.-]*", file):
                raise ValueError(f"{name!r} is in {file!r}, which is outside its directory")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight files ({error!r}); fetch it again"
        ) from None
    files = [index.parent / file for file in sorted(set(names.values()))]
    missing = ", ".join(file.name for file in files if not file.is_file())
    if missing:
        raise CheckpointError(f"{index} names files that are missing: {missing}; fetch them again")
    return files


@contextlib.contextmanager
def _damage_as_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights file {file} is truncated or damaged ({error}); fetch it again"
        ) from None


def read_safetensors(file: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or has a dtype that torch does not know.
    """
    with _damage_as_errors(file), safe_open(file, framework="pt") as opened:
        tensors = {}
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            header = opened.get_slice(name)
            dtype = header.get_dtype()
            if dtype not in _TYPES:
                raise CheckpointError(f"weights file {file} has {name!r} as {dtype}; unpack it")
            tensors[name] = Stored(
                tuple(header.get_shape()),
                _TYPES[dtype],
                file,
            )
        return tensors


def _read_pickled(file: Path) -> dict[str, Stored]:
    state = read_pickle(file)
    error = CheckpointError(
        f"weights file {file} is not a dict of tensors; save model.state_dict()"
    )
    if not isinstance(state, Mapping):
        raise error
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise error
        tensors[name] = Stored(tuple(tensor.shape), tensor.dtype, tensor)
    return tensors


def write_weight_file(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write and sync one weight file.

    Raises:
        CheckpointError: If it cannot be written.
    """
    with failures_as_errors(f"weights file {folder / name} is not written"):
        try:
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        sync(folder / name)
