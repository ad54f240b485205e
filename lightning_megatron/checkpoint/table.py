"""``.metadata``, the table of contents of torch's distributed checkpoints, read without running code.

Torch stores the table in a pickle, which it loads without restriction. Here the names in it become stand-ins that do
nothing, and the table is rebuilt from what they keep.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_megatron.checkpoint.meta import TABLE
from lightning_megatron.checkpoint.pickles import StandIn, check_archive, scan_pickle, stand_in
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.paths import is_remote

_TABLE_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|planner|filesystem)\.\w+|torch\.(Size|serialization\._get_layout)"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath|builtins\.getattr"
)
"""Names of all classes in a table of contents, besides dtypes (torch 2.10 to 2.13), and the function by which Python
3.11.0 to 3.11.3 pickle a member of an enumeration."""


class _TableUnpickler(pickle.Unpickler):
    """Unpickler of tables of contents: replaces their classes by stand-ins, and refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            dtype = vars(torch).get(name)
            if isinstance(dtype, torch.dtype):
                return dtype
        if _TABLE_NAMES.fullmatch(f"{module}.{name}"):
            return stand_in(f"{module}.{name}")
        raise CheckpointError(f"it would run {module}.{name} when loaded")


def read_table(path: Path) -> Any:
    """Read the table of contents of a distributed checkpoint: a ``torch.distributed.checkpoint.metadata.Metadata``.

    Raises:
        CheckpointError: If it names anything but the classes of such a table, points outside the checkpoint, has two
            chunks with the same values, or cannot be read. Readers count the values of chunks, and would take the
            second copy for values that are in no file.
    """
    try:
        content = io.BytesIO((path / TABLE).read_bytes())
        scan_pickle(content)
        content.seek(0)
        state = _TableUnpickler(content).load().state
        entries = _rebuild(state["state_dict_metadata"], {})
        locations = _rebuild(state["storage_data"], {})
        for location in locations.values():
            if Path(location.relative_path).name != location.relative_path:
                raise CheckpointError(f"it points outside itself, to {location.relative_path!r}")
            if location.transform_descriptors:  # torch would decompress it, to whatever size
                raise CheckpointError(f"it has a compressed entry in {location.relative_path}")
        for name, entry in entries.items():
            if isinstance(entry, metadata.TensorStorageMetadata) and not are_disjoint(entry.chunks):
                raise CheckpointError(f"it has some values of {name!r} twice")
        # All that readers need.
        return metadata.Metadata(state_dict_metadata=entries, storage_data=locations)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path} is not loaded: {error}; do not trust its source"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(
            f"checkpoint {path} has an unreadable {TABLE} ({error!r}); use an earlier one"
        ) from None


_TABLE_CLASSES = {
    each.__name__: each
    for each in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorStorageMetadata,
        metadata.MetadataIndex,
        filesystem._StorageInfo,
    )
}


def _rebuild(node: Any, rebuilt: dict[int, Any]) -> Any:
    """Rebuild torch's objects from the stand-ins of a table.

    Args:
        node: A part of the table.
        rebuilt: Results by ``id`` of their nodes: one that many others hold is rebuilt once.
    """
    if id(node) not in rebuilt:
        rebuilt[id(node)] = _rebuild_new(node, rebuilt)
    return rebuilt[id(node)]


def _rebuild_new(node: Any, rebuilt: dict[int, Any]) -> Any:
    if isinstance(node, dict):
        return {_rebuild(key, rebuilt): _rebuild(value, rebuilt) for key, value in node.items()}
    if isinstance(node, list):
        return [_rebuild(item, rebuilt) for item in node]
    if not isinstance(node, StandIn):
        return node
    name = type(node).__name__
    if name == "Size":
        return torch.Size(node.arguments[0])
    if name == "TensorProperties":
        return metadata.TensorProperties(dtype=node.state[0])
    return _TABLE_CLASSES[name](**_rebuild(node.state or {}, rebuilt))


def are_disjoint(chunks: Sequence[metadata.ChunkStorageMetadata]) -> bool:
    """Whether no two chunks of a tensor have a value in common.

    They are split where no chunk lies on both sides, along one axis after another: n log n for any layout of ranks.

    Args:
        chunks: The chunks; of what cannot be split, such as a spiral, all pairs are compared.
    """
    filled = [chunk for chunk in chunks if all(chunk.sizes)]
    if len(filled) < 2:
        return True
    for axis in range(len(filled[0].sizes)):
        parts = _split(filled, axis)
        if len(parts) > 1:
            return all(map(are_disjoint, parts))
    return not any(itertools.starmap(_overlap, itertools.combinations(filled, 2)))


def _split(
    chunks: Sequence[metadata.ChunkStorageMetadata], axis: int
) -> list[list[metadata.ChunkStorageMetadata]]:
    """Chunks in groups, none of which reaches into another one along ``axis``."""
    parts: list[list[metadata.ChunkStorageMetadata]] = []
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        start = chunk.offsets[axis]
        if not parts or start >= end:
            parts.append([])
        parts[-1].append(chunk)
        end = max(end, start + chunk.sizes[axis])
    return parts


def _overlap(one: metadata.ChunkStorageMetadata, other: metadata.ChunkStorageMetadata) -> bool:
    boxes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in boxes
    )


class _CheckedReads:
    """Mixin of torch's readers, which unpickle tensors by themselves: checks each entry before it is read."""

    storage_data: dict[Any, Any]
    path: Any
    fs: Any

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the reader's.

        Raises:
            CheckpointError: If an entry would become larger than it is when it is loaded.
        """
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for index in {item.storage_index for item in tensors}:
            entry = self.storage_data[index]
            name = f"{index.fqn} in {entry.relative_path}"
            path = self.fs.concat_path(self.path, entry.relative_path)
            with self.fs.create_stream(path, "rb") as stream:
                check_archive(stream, entry.offset, entry.length, name)
        reading: Future[None] = super().read_data(plan, planner)  # type: ignore[misc]
        return reading


class _FileReader(_CheckedReads, filesystem.FileSystemReader):
    pass


class _StoreReader(_CheckedReads, FsspecReader):
    pass


def table_reader(path: Path, table: metadata.Metadata) -> filesystem.FileSystemReader:
    """Torch's reader of shards, on a disk or in an object store, for a table of contents of ``read_table``."""
    kind = _StoreReader if is_remote(path) else _FileReader
    reader = kind(str(path))
    reader.read_metadata = lambda *_, **__: table  # type: ignore[method-assign]
    reader.set_up_storage_reader(table, is_coordinator=False)
    return reader
