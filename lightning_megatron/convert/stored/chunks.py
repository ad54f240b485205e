"""Where in a distributed checkpoint's files are these rows of this tensor? Found chunk by chunk, and read without more.

Torch's distributed checkpoints cut tensors into chunks along any axes and put each, as an archive of ``torch.save``,
somewhere into a file. The numbers of a chunk lie in its archive one after the other, so that a part of it can be read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_safety import read_table
from lightning_megatron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, and the archive that holds it."""

    start: tuple[int, ...]
    """Its first index along each axis of the tensor."""
    size: tuple[int, ...]
    file: Path
    offset: int
    """Where in the file its archive begins."""
    length: int
    """Bytes of the archive."""


@dataclass(frozen=True, kw_only=True)
class ChunkedTensor:
    """One tensor of a distributed checkpoint, as its table of contents has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    """Together they are the tensor, each number once."""


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """Where a chunk's numbers are in its file."""

    offset: int
    strides: tuple[int, ...]


class ChunkedFiles:
    """The tensors of one distributed checkpoint; nothing of them is read until ``read`` is called."""

    def __init__(self, path: Path, tensors: Mapping[str, ChunkedTensor]) -> None:
        self.path = path
        self.tensors = tensors
        self._numbers: dict[Chunk, _Numbers | None] = {}

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at index ``start`` and has the shape ``size``, on the CPU.

        Raises:
            CheckpointError: If a file is damaged.
        """
        tensor = self.tensors[name]
        box = torch.empty(tuple(size), dtype=tensor.dtype)
        for chunk in tensor.chunks:
            first = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(start, size, chunk.start, chunk.size, strict=True)]
            if all(a < b for a, b in zip(first, last, strict=True)):
                common = tuple(b - a for a, b in zip(first, last, strict=True))
                here = tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True))
                box[here] = self._part(
                    chunk, tensor.dtype, [a - s for a, s in zip(first, chunk.start, strict=True)], common
                )
        return box

    def _part(self, chunk: Chunk, dtype: torch.dtype, start: Sequence[int], size: tuple[int, ...]) -> torch.Tensor:
        """A box of a chunk: the numbers from its first to its last one, and what lies between them."""
        if chunk not in self._numbers:
            self._numbers[chunk] = _find_numbers(chunk, dtype)
        numbers = self._numbers[chunk]
        if numbers is None:
            return _load(chunk)[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        first = sum(a * stride for a, stride in zip(start, numbers.strides, strict=True))
        count = 1 + sum((n - 1) * stride for n, stride in zip(size, numbers.strides, strict=True))
        data = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        _read_into(data, chunk.file, numbers.offset + first * dtype.itemsize)
        return data.view(dtype).as_strided(size, numbers.strides)


def open_chunks(path: Path) -> ChunkedFiles:
    """Look at the table of contents of a distributed checkpoint; entries that are no tensors are left out.

    Raises:
        CheckpointError: If it is damaged, could run code, or names files that are missing, too short or elsewhere.
    """
    table = read_table(path)
    try:
        archives: dict[tuple[str, tuple[int, ...]], Any] = {
            (index.fqn, tuple(index.offset)): place
            for index, place in table.storage_data.items()
            if index.offset is not None
        }
        tensors = {
            str(name): _chunked(path, str(name), stored, archives)
            for name, stored in table.state_dict_metadata.items()
            if hasattr(stored, "properties")
        }
    except (AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged table of contents ({error!r}); use another") from None
    _check_files(path, tensors)
    return ChunkedFiles(path, tensors)


def _check_files(path: Path, tensors: Mapping[str, ChunkedTensor]) -> None:
    """Raise unless every file is there, and as long as its chunks need."""
    lengths: dict[Path, int] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            lengths[chunk.file] = max(lengths.get(chunk.file, 0), chunk.offset + chunk.length)
    for file, length in lengths.items():
        if file.parent != path:
            raise CheckpointError(f"checkpoint {path} points outside itself, to {file}; do not trust its source")
        if not file.is_file() or file.stat().st_size < length:
            raise CheckpointError(
                f"checkpoint {path} is damaged: its file {file.name} is missing, or shorter than {length} bytes; use "
                "another"
            )


def _chunked(path: Path, name: str, stored: Any, archives: Mapping[tuple[str, tuple[int, ...]], Any]) -> ChunkedTensor:
    shape = tuple(stored.size)
    chunks = {}
    for chunk in stored.chunks:
        start, size = tuple(chunk.offsets), tuple(chunk.sizes)
        place = archives[name, start]
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"checkpoint {path} is packed ({', '.join(place.transform_descriptors)}), which is not supported; "
                "save it without extensions of the writer"
            )
        chunks[start] = Chunk(
            start=start, size=size, file=path / place.relative_path, offset=place.offset, length=place.length
        )
    is_inside = all(
        a >= 0 and a + n <= whole
        for chunk in chunks.values()
        for a, n, whole in zip(chunk.start, chunk.size, shape, strict=True)
    )
    if not is_inside or sum(math.prod(chunk.size) for chunk in chunks.values()) != math.prod(shape):
        raise CheckpointError(f"checkpoint {path} does not hold all of {name!r}: it is damaged; use another")
    return ChunkedTensor(shape=shape, dtype=stored.properties.dtype, chunks=tuple(chunks.values()))


def _find_numbers(chunk: Chunk, dtype: torch.dtype) -> _Numbers | None:
    """Torch notes where a storage is in an archive when it loads one without its numbers (serialization.py)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = _load(chunk)
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if tuple(tensor.shape) != chunk.size or tensor.dtype != dtype:
        raise CheckpointError(
            f"checkpoint file {chunk.file} is damaged: at byte {chunk.offset} is a tensor of {list(tensor.shape)} "
            f"{tensor.dtype}, and there should be {list(chunk.size)} {dtype}; use another"
        )
    if start is None:
        return None
    offset = int(start) + int(tensor.storage_offset()) * dtype.itemsize
    strides = tuple(tensor.stride())
    count = 1 + sum((n - 1) * stride for n, stride in zip(chunk.size, strides, strict=True))
    if offset + count * dtype.itemsize > chunk.length:
        raise CheckpointError(f"checkpoint file {chunk.file} is damaged at byte {chunk.offset}; use another")
    return _Numbers(offset=chunk.offset + offset, strides=strides)


def _load(chunk: Chunk) -> torch.Tensor:
    with (
        failures_as_errors(f"checkpoint file {chunk.file} cannot be read"),
        chunk.file.open("rb") as file,
    ):
        tensor = torch.load(
            io.BufferedReader(_Window(file, chunk.offset, chunk.length)), map_location="cpu", weights_only=True
        )
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"checkpoint file {chunk.file} holds no tensor at byte {chunk.offset}; use another")
    return tensor.detach()


class _Window(io.RawIOBase):
    """A part of a file that looks like a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._position)])
        self._position += count
        return count


def _read_into(data: torch.Tensor, file: Path, offset: int) -> None:
    """Plain reads: mapped pages would count as memory of this process."""
    view, done = memoryview(data.numpy().data), 0
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(view):
                count = opened.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"checkpoint file {file} is truncated; use another checkpoint")
                done += count
    except OSError as error:
        raise CheckpointError(f"checkpoint file {file} cannot be read ({error}); check the disk") from error
