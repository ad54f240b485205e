"""Which tensors does a Hugging Face model directory hold, and how is a part of one read without reading the rest?

Safetensors files are read with plain file reads at the offsets of their header, not mapped: mapped pages count as
memory of this process for as long as the file is open, and a rank would come to hold its shard twice. Pickled files
(``.bin``) are mapped by torch, and mapped anew now and then for the same reason.
"""

from __future__ import annotations

import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED_FILE = "pytorch_model.bin"
_PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format calls the dtypes that a model's tensors may have."""

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_LARGEST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
_MAPPED_BYTES = 16 << 20
"""After reading so much of a mapped file, or its largest tensor, it is mapped anew."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None if torch has no such dtype."""
    dtype_name: str
    """For messages."""
    offset: int = 0
    """Safetensors: where in the file its first byte is."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first axis to the next."""
        return math.prod(self.shape[1:]) * (self.dtype.itemsize if self.dtype else 1)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 1)


class WeightFiles(ABC):
    """The tensors of one model directory; nothing of them is read until ``rows`` is called."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors

    @abstractmethod
    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the tensor ``name``, on the CPU, in the file's dtype: [stop - start, ...].

        Raises:
            CheckpointError: If the file cannot be read, or ends too early.
        """


def open_weights(directory: str | Path) -> WeightFiles:
    """Look at the weight files of ``directory``, safetensors before pickled ones, as transformers does.

    Raises:
        CheckpointError: If there are none, one is missing, damaged or truncated, or holds more than tensors.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist; give a folder with {WEIGHTS_FILE}")
    for single, index, kind in (
        (WEIGHTS_FILE, INDEX_FILE, _Safetensors),
        (_PICKLED_FILE, _PICKLED_INDEX_FILE, _Pickled),
    ):
        if (directory / single).is_file():
            return kind.open(directory, [directory / single], ())
        if (directory / index).is_file():
            names = _weight_map(directory / index)
            files = [directory / file for file in sorted(set(names.values()))]
            missing = ", ".join(file.name for file in files if not file.is_file())
            if missing:
                raise CheckpointError(f"{directory / index} names files that are missing: {missing}; fetch them again")
            return kind.open(directory, files, tuple(names))
    raise CheckpointError(
        f"model directory {directory} has no weights: none of {WEIGHTS_FILE}, {INDEX_FILE}, {_PICKLED_FILE}, "
        f"{_PICKLED_INDEX_FILE}; save them with save_pretrained, or train from random weights with pretrained=False"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each tensor is in; files may not lie outside the folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({error!r}); fetch it again") from None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()) or not names:
        raise CheckpointError(f"the weight_map of {index} does not name a file for each tensor; fetch it again")
    for name, file in names.items():
        path = PurePosixPath(file.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in file or not path.parts:
            raise CheckpointError(
                f"{index} says that {name!r} is in {file!r}, which is outside its folder; do not use this model"
            )
    return names


def _check_index(directory: Path, promised: tuple[str, ...], tensors: Mapping[str, StoredTensor]) -> None:
    missing = [name for name in promised if name not in tensors]
    if missing:
        raise CheckpointError(
            f"the index of {directory} promises tensors that are in none of its files: {', '.join(missing)}; fetch the "
            "files again"
        )


# ---- safetensors ----------------------------------------------------------------------------------------------------


class _Safetensors(WeightFiles):
    @classmethod
    def open(cls, directory: Path, files: list[Path], promised: tuple[str, ...]) -> _Safetensors:
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            tensors |= _read_header(file)
        _check_index(directory, promised, tensors)
        return cls(directory, tensors)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self.tensors[name]
        assert tensor.dtype is not None
        buffer = torch.empty((stop - start) * tensor.row_bytes, dtype=torch.uint8)
        if buffer.numel():
            _read_into(buffer, tensor.file, tensor.offset + start * tensor.row_bytes)
        return buffer.view(tensor.dtype).view(stop - start, *tensor.shape[1:])


def _read_into(buffer: torch.Tensor, file: Path, offset: int) -> None:
    view, done = memoryview(buffer.numpy()), 0
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(view):
                count = opened.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"weights file {file} is truncated; fetch it again")
                done += count
    except OSError as error:
        raise CheckpointError(f"weights file {file} cannot be read ({error}); check the disk") from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON object, then the bytes that it refers to."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _LARGEST_HEADER_BYTES):
                raise CheckpointError(f"weights file {file} is truncated or no safetensors file; fetch it again")
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"weights file {file} cannot be read ({error}); check the disk") from error
    try:
        header = json.loads(text)
        entries = {name: _entry(file, 8 + length, fields) for name, fields in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of weights file {file} is damaged ({error}); fetch it again") from None
    end = max((tensor.offset + length for tensor, length in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"weights file {file} is truncated: {size} of {end} bytes are there; fetch it again")
    return {name: tensor for name, (tensor, _) in entries.items()}


def _entry(file: Path, data_start: int, fields: dict[str, Any]) -> tuple[StoredTensor, int]:
    """One tensor and the length of its bytes, which must be what its shape and dtype take."""
    start, stop = (int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(size) for size in fields["shape"])
    dtype = _DTYPES.get(fields["dtype"])
    tensor = StoredTensor(
        file=file, shape=shape, dtype=dtype, dtype_name=str(dtype or fields["dtype"]), offset=data_start + start
    )
    if min((start, *shape)) < 0 or stop < start or (dtype is not None and tensor.num_bytes != stop - start):
        raise ValueError(f"{stop - start} bytes for the shape {list(shape)} of {fields['dtype']}")
    return tensor, stop - start


# ---- pickled --------------------------------------------------------------------------------------------------------


class _Pickled(WeightFiles):
    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(directory, tensors)
        self._file: Path | None = None
        self._loaded: dict[str, torch.Tensor] = {}
        self._read_bytes = 0
        self._most_bytes = max((_MAPPED_BYTES, *(tensor.num_bytes for tensor in tensors.values())))

    @classmethod
    def open(cls, directory: Path, files: list[Path], promised: tuple[str, ...]) -> _Pickled:
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in _load_pickled(file).items():
                shape, dtype = tuple(tensor.shape), tensor.dtype
                tensors[name] = StoredTensor(file=file, shape=shape, dtype=dtype, dtype_name=str(dtype))
        _check_index(directory, promised, tensors)
        return cls(directory, tensors)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        file = self.tensors[name].file
        if file != self._file or self._read_bytes >= self._most_bytes:
            self._loaded = {}  # before the next one is mapped
            self._loaded, self._file, self._read_bytes = _load_pickled(file), file, 0
        self._read_bytes += (stop - start) * self.tensors[name].row_bytes
        return self._loaded[name].detach()[start:stop].clone(memory_format=torch.contiguous_format)


def _load_pickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled file, mapped; files of torch before 1.6 cannot be mapped and are read whole."""
    with failures_as_errors(f"weights file {file} cannot be read (fetch it again)"):
        tensors = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"weights file {file} is not a dict of tensors; save model.state_dict()")
    return tensors
