"""How are boxes of tensors written as a distributed checkpoint? By torch's writer, each read when its turn comes."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lightning_megatron.checkpoint.files import FileChecksums

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What ``metadata.json`` says; Megatron-Core picks its reader by it."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of an entry, and where its numbers come from."""

    rank: int
    """Whose file it is in."""
    entry: str
    whole: tuple[int, ...]
    """Shape of the entry."""
    dtype: torch.dtype
    start: tuple[int, ...]
    size: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Reads the box: of the shape ``size``, contiguous and with memory of its own."""


def write_chunks(
    folder: Path, num_ranks: int, chunks: Sequence[Chunk], objects: Mapping[str, bytes]
) -> dict[str, FileChecksums]:
    """Write the data files, the table of contents and ``metadata.json``.

    Args:
        folder: Exists.
        num_ranks: Files are named after ranks, one for each.
        chunks: In the order in which they are read and written, rank by rank.
        objects: Entries that are no tensors, with what ``torch.save`` makes of them; in the first file.

    Returns:
        The checksums of the data files and the table of contents, which are not to be read again for them.
    """
    writer = _Writer(folder)
    writer.set_up_storage_writer(True)
    planner = _Planner(chunks, objects)
    items = [_item(chunk) for chunk in chunks]
    plans = []
    for rank in range(num_ranks):
        bytes_first = [_object_item(name) for name in objects] if rank == 0 else []
        mine = [item for item, chunk in zip(items, chunks, strict=True) if chunk.rank == rank]
        plans.append(writer.prepare_local_plan(SavePlan(bytes_first + mine)))
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(_table(chunks, objects), results)
    (folder / "metadata.json").write_text(json.dumps(_BACKENDS))
    return writer.files.checksums


class _Writer(FileSystemWriter):
    """Sums up what it writes, and does not write down where, which may be a temporary name."""

    def __init__(self, folder: Path) -> None:
        # per_thread_copy_ahead=0: nothing is read before its turn, though there be a GPU.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self.files = self.fs = _Files()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Files(FileSystem):
    """Torch's files, with the checksums of what was written to each."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksums] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            yield _Summed(stream, self.checksums.setdefault(Path(path).name, FileChecksums()))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _Summed(io.RawIOBase):
    """A stream that is written from its beginning to its end."""

    def __init__(self, stream: Any, checksums: FileChecksums) -> None:
        super().__init__()
        self._stream, self._checksums = stream, checksums

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._checksums.update(memoryview(data).cast("B"))
        return int(self._stream.write(data))

    def tell(self) -> int:
        return self._checksums.size

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def flush(self) -> None:
        if not self.closed:
            self._stream.flush()


class _Planner(DefaultSavePlanner):
    """Reads what an item of the plan stands for."""

    def __init__(self, chunks: Iterable[Chunk], objects: Mapping[str, bytes]) -> None:
        super().__init__()
        self._chunks = {_index(chunk): chunk for chunk in chunks}
        self._objects = objects
        self._last: torch.Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        if self._last is not None:
            # It is written; torch's writer only forgets it at the end of the file.
            self._last.untyped_storage().resize_(0)
        self._last = self._chunks[write_item.index].read()
        return self._last


def _index(chunk: Chunk) -> MetadataIndex:
    return MetadataIndex(chunk.entry, torch.Size(chunk.start))


def _item(chunk: Chunk) -> WriteItem:
    data = TensorWriteData(chunk=_box(chunk), properties=_properties(chunk), size=torch.Size(chunk.whole))
    return WriteItem(index=_index(chunk), type=WriteItemType.SHARD, tensor_data=data)


def _object_item(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.start), sizes=torch.Size(chunk.size))


def _properties(chunk: Chunk) -> TensorProperties:
    return TensorProperties(dtype=chunk.dtype)


def _table(chunks: Iterable[Chunk], objects: Iterable[str]) -> Metadata:
    """Everything but the places in the files, which the writer knows."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: BytesStorageMetadata() for name in objects
    }
    for chunk in chunks:
        entry = entries.setdefault(
            chunk.entry,
            TensorStorageMetadata(properties=_properties(chunk), size=torch.Size(chunk.whole), chunks=[]),
        )
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(_box(chunk))
    return Metadata(state_dict_metadata=entries)
