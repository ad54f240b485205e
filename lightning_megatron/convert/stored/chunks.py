"""Where in a distributed checkpoint's files are these rows of this tensor? Found chunk by chunk, and read without more.

Torch's distributed checkpoints cut tensors into chunks along any axes and put each, as an archive of ``torch.save``,
somewhere into a file. The numbers of a chunk lie in its archive one after the other, so that a part of it can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import read_table
from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.pickled.unpickler import FilePart, load_pickled
from lightning_megatron.convert.stored.distributed_names import is_of_optimizer
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


class ChunkedFiles:
    """The tensors of one distributed checkpoint; nothing of them is read until ``read`` is called."""

    def __init__(self, path: Path, tensors: Mapping[str, ChunkedTensor]) -> None:
        self.path = path
        self.tensors = tensors
        self._handles: dict[Chunk, TensorHandle] = {}

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The box of a tensor that begins at index ``start`` and has the shape ``size``, on the CPU.

        Raises:
            CheckpointError: If a file is damaged.
        """
        tensor, box = self.tensors[name], None
        for chunk in tensor.chunks:
            first = [max(a, b) for a, b in zip(start, chunk.start, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(start, size, chunk.start, chunk.size, strict=True)]
            common = tuple(b - a for a, b in zip(first, last, strict=True))
            if min(common, default=1) > 0:
                part = self._part(chunk, tensor.dtype, [a - s for a, s in zip(first, chunk.start, strict=True)], common)
                if common == tuple(size):
                    return part
                box = box or Filling(name, torch.empty(tuple(size), dtype=tensor.dtype))
                box.put(tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True)), part)
        return (box or Filling(name, torch.empty(tuple(size), dtype=tensor.dtype))).whole()

    def _part(self, chunk: Chunk, dtype: torch.dtype, start: Sequence[int], size: tuple[int, ...]) -> torch.Tensor:
        """A box of a chunk: what is between its first and its last number is read, too."""
        if chunk not in self._handles:
            self._handles[chunk] = _handle(chunk, dtype)
        handle = self._handles[chunk]
        first = handle.first + sum(a * stride for a, stride in zip(start, handle.stride, strict=True))
        return replace(handle, shape=size, first=first).whole()


def open_chunks(path: Path) -> ChunkedFiles:
    """Look at a distributed checkpoint's table of contents; an optimizer's entries and what is no tensor are left out.

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
            if hasattr(stored, "properties") and not is_of_optimizer(str(name))
        }
    except CheckpointError:
        raise
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
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
        if not all(type(number) is int and number >= 0 for number in (*start, *size, place.offset, place.length)):
            raise ValueError(f"a place of {name!r} that is no number")
        chunks[start] = Chunk(
            start=start, size=size, file=path / place.relative_path, offset=place.offset, length=place.length
        )
    is_inside = all(
        a >= 0 and a + n <= whole
        for chunk in chunks.values()
        for a, n, whole in zip(chunk.start, chunk.size, shape, strict=True)
    )
    is_whole = sum(math.prod(chunk.size) for chunk in chunks.values()) == math.prod(shape)
    if not is_inside or not is_whole:
        raise CheckpointError(f"checkpoint {path} does not hold all of {name!r}: it is damaged; use another")
    return ChunkedTensor(shape=shape, dtype=stored.properties.dtype, chunks=tuple(chunks.values()))


def _handle(chunk: Chunk, dtype: torch.dtype) -> TensorHandle:
    """Where the numbers of a chunk are."""
    handle = load_pickled(FilePart(path=chunk.file, start=chunk.offset, size=chunk.length))
    if not isinstance(handle, TensorHandle) or handle.shape != chunk.size or handle.dtype != dtype:
        found = f"a tensor of {list(handle.shape)} {handle.dtype}" if isinstance(handle, TensorHandle) else "no tensor"
        raise CheckpointError(
            f"checkpoint file {chunk.file} is damaged: at byte {chunk.offset} is {found}, and there should be one of "
            f"{list(chunk.size)} {dtype}; use another"
        )
    return handle
