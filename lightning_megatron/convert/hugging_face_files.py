"""Which tensors does a Hugging Face model directory hold, and how is a part of one read without reading the rest?

Files are read with plain reads at the offsets of their header, not mapped: mapped pages count as memory of this process
for as long as the file is open, and a rank would come to hold its shard twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.pickled.unpickler import load_pickled
from lightning_megatron.convert.plain_reads import read_into
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

_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_LARGEST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None if torch has no such dtype."""
    dtype_name: str
    """For messages."""
    place: int | TensorHandle
    """Where in the file its first byte is, or how its rows lie there."""

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first axis to the next."""
        return math.prod(self.shape[1:]) * (self.dtype.itemsize if self.dtype else 1)

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 1)


class WeightFiles:
    """The tensors of one model directory; nothing of them is read until ``rows`` is called."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` of the tensor ``name``, on the CPU, in the file's dtype: [stop - start, ...].

        Raises:
            CheckpointError: If the file cannot be read, or ends too early.
        """
        tensor = self.tensors[name]
        assert tensor.dtype is not None
        if isinstance(tensor.place, TensorHandle):
            return tensor.place.rows(start, stop)
        buffer = torch.empty((stop - start) * tensor.row_bytes, dtype=torch.uint8)
        if buffer.numel():
            read_into(buffer, tensor.file, tensor.place + start * tensor.row_bytes)
        return buffer.view(tensor.dtype).view(stop - start, *tensor.shape[1:])


def has_weights(directory: Path) -> bool:
    """Whether there are weight files where transformers looks for them."""
    names = (WEIGHTS_FILE, INDEX_FILE, _PICKLED_FILE, _PICKLED_INDEX_FILE)
    return any((directory / name).is_file() for name in names)


def directory_of(file: Path) -> Path | None:
    """The model directory that a weight file or its index is a part of; None if ``file`` is none."""
    names = {WEIGHTS_FILE, INDEX_FILE, _PICKLED_FILE, _PICKLED_INDEX_FILE}
    is_part = file.name in names or _SHARD.fullmatch(file.name) is not None
    return file.parent if is_part and file.is_file() and has_weights(file.parent) else None


def open_weights(directory: str | Path) -> WeightFiles:
    """Look at the weight files of ``directory``, safetensors before pickled ones, as transformers does.

    Raises:
        CheckpointError: If there are none, one is missing, damaged or truncated, or holds more than tensors.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist; give a folder with {WEIGHTS_FILE}")
    for single, index, read in (
        (WEIGHTS_FILE, INDEX_FILE, _safetensors),
        (_PICKLED_FILE, _PICKLED_INDEX_FILE, _pickled),
    ):
        if (directory / single).is_file():
            return WeightFiles(directory, read(directory / single))
        if (directory / index).is_file():
            return WeightFiles(directory, _of_index(directory / index, read))
    raise CheckpointError(
        f"model directory {directory} has no weights: none of {WEIGHTS_FILE}, {INDEX_FILE}, {_PICKLED_FILE}, "
        f"{_PICKLED_INDEX_FILE}; save them with save_pretrained, or train from random weights with pretrained=False"
    )


def _of_index(index: Path, read: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    names = _weight_map(index)
    files = [index.parent / file for file in sorted(set(names.values()))]
    missing = ", ".join(file.name for file in files if not file.is_file())
    if missing:
        raise CheckpointError(f"{index} names files that are missing: {missing}; fetch them again")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read(file)
    absent = ", ".join(name for name in names if name not in tensors)
    if absent:
        raise CheckpointError(f"{index} promises tensors that are in none of its files: {absent}; fetch them again")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each tensor is in; files may not lie outside the folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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


# ---- safetensors ----------------------------------------------------------------------------------------------------


def _safetensors(file: Path) -> dict[str, StoredTensor]:
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
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the header of weights file {file} is damaged ({error}); fetch it again") from None
    end = max((stop for _, stop in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"weights file {file} is truncated: {size} of {end} bytes are there; fetch it again")
    return {name: tensor for name, (tensor, _) in entries.items()}


def _entry(file: Path, data_start: int, fields: dict[str, Any]) -> tuple[StoredTensor, int]:
    """One tensor, whose bytes must be as many as its shape and dtype take, and where in the file it ends."""
    start, stop = (int(offset) for offset in fields["data_offsets"])
    shape = tuple(int(size) for size in fields["shape"])
    dtype = _DTYPES.get(fields["dtype"])
    tensor = StoredTensor(
        file=file, shape=shape, dtype=dtype, dtype_name=str(dtype or fields["dtype"]), place=data_start + start
    )
    if min((start, *shape)) < 0 or stop < start or (dtype is not None and tensor.num_bytes != stop - start):
        raise ValueError(f"{stop - start} bytes for the shape {list(shape)} of {fields['dtype']}")
    return tensor, data_start + stop


# ---- pickled --------------------------------------------------------------------------------------------------------


def _pickled(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of ``torch.save``, whose bytes are not read."""
    held = load_pickled(file)
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, TensorHandle) for name, tensor in held.items()
    ):
        raise CheckpointError(f"weights file {file} is not a dict of tensors; save model.state_dict()")
    return {
        name: StoredTensor(
            file=file, shape=tensor.shape, dtype=tensor.dtype, dtype_name=str(tensor.dtype), place=tensor
        )
        for name, tensor in held.items()
    }
