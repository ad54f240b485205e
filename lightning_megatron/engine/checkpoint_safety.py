"""Checks that a checkpoint is complete and only data, before any of it reaches a loader that could run code.

Torch's distributed checkpoints keep their table of contents in a pickle, which torch loads without restriction. Here
its names become stand-ins that do nothing, and the table is made anew from what they have kept. Torch gets that one.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.errors import CheckpointError

META = "meta.pt"
"""Lightning's own state and the description of the run; written last, so its presence means "complete"."""

COMMON = "common.pt"
"""What Megatron does not shard: parameter groups and step counts."""

_TABLE_OF_CONTENTS = ".metadata"
_BACKENDS = "metadata.json"
_KNOWN_BACKENDS = {"sharded_backend": "torch_dist", "common_backend": "torch"}

_TABLE_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|planner|filesystem)\.\w+|torch\.(Size|serialization\._get_layout)"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath"
)
"""Everything that a table of contents consists of, besides dtypes (torch 2.10 to 2.13)."""

_BYTEARRAY = (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n")
"""How a pickle names it."""
_DEEPEST = 100
"""Containers in each other."""
_MOST_ITEMS = 1_000_000
_MOST_ITEMS_OF_A_BYTE = 10
"""What a file may hold in its containers, items that stand in several of them counted as often: each takes a byte."""


class _StandIn:
    """Takes the place of a class or function that a pickle names: it keeps what it is called with, and does nothing.

    No instruction of a pickle can change it: Python's unpickler leaves attributes to ``__setstate__``, which it looks
    up on classes (here without ``self``) as on objects.
    """

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, *state: Any) -> None:
        if not state:
            raise CheckpointError("it would change a class when loaded")
        (self.state,) = state


class _TableUnpickler(pickle.Unpickler):
    """Finds stand-ins for what the table of contents of a distributed checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if _TABLE_NAMES.fullmatch(f"{module}.{name}"):
            return type(name, (_StandIn,), {})
        raise CheckpointError(f"it would run {module}.{name} when loaded")


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint of Megatron-Core, of ours or of another program."""
    return (path / _TABLE_OF_CONTENTS).is_file() and (path / _BACKENDS).is_file()


def check_replaceable(path: Path) -> None:
    """Raise if a checkpoint of that name would take the place of a folder of something else.

    Raises:
        CheckpointError: If ``path`` is a folder with files of which none is a checkpoint's.
    """
    if path.is_symlink() or not path.is_dir() or not any(path.iterdir()):
        return
    own = (path / name for name in (META, COMMON, _TABLE_OF_CONTENTS, _BACKENDS))
    if not any(file.exists() for file in own) and not any(path.glob("*.distcp")):
        raise CheckpointError(f"{path} is a folder of other files, which would be lost; give the checkpoint a new name")


def check_complete(path: Path) -> None:
    """Raise unless ``path`` is a finished checkpoint directory of ours.

    Raises:
        CheckpointError: If it is missing, is not a directory, or was never finished.
    """
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} does not exist; give the path of a *.ckpt directory")
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path} is a file, not a directory that this strategy wrote; give a *.ckpt directory"
        )
    if not (path / META).is_file():
        raise CheckpointError(
            f"checkpoint {path} has no {META}: it was never finished, or another program wrote it; use an earlier one"
        )
    for name in (_TABLE_OF_CONTENTS, _BACKENDS, COMMON):
        if not (path / name).is_file():
            raise CheckpointError(
                f"checkpoint {path} lacks its file {name}: it is damaged, or another strategy wrote it; use an earlier "
                "one that MegatronStrategy wrote"
            )


def check_only_data(path: Path) -> None:
    """Raise if loading the checkpoint could run code, or if a data file is shorter than the table of contents says.

    Raises:
        CheckpointError: If a file names anything but data, cannot be read, or is truncated.
    """
    check_backends(path)
    load_plain(path / COMMON)
    for name, length in _lengths_needed(path).items():
        _check_file(path, name, length)


def check_backends(path: Path) -> None:
    """Refuse other formats: Megatron picks the code that reads the rest by this file.

    Raises:
        CheckpointError: If the format is another one, or cannot be read.
    """
    try:
        backends = json.loads((path / _BACKENDS).read_bytes())
        known = all(backends[name] == value for name, value in _KNOWN_BACKENDS.items())
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path} has an unreadable {_BACKENDS} ({error!r}); use an earlier one"
        ) from None
    if not known:
        raise CheckpointError(
            f"checkpoint {path} has the format {backends}, and this program reads {_KNOWN_BACKENDS}; give one that "
            "MegatronStrategy wrote"
        )


def read_table(path: Path) -> Any:
    """The table of contents of a distributed checkpoint, a ``torch.distributed.checkpoint.metadata.Metadata``.

    Raises:
        CheckpointError: If it names anything but what such a table consists of, points outside the checkpoint, or
            cannot be read.
    """
    try:
        made = _TableUnpickler(io.BytesIO((path / _TABLE_OF_CONTENTS).read_bytes())).load()
        return _table_of(made.state)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is not loaded: {error}; do not trust its source") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise _unreadable_table(path, error) from None


def _table_of(state: Any) -> Any:
    """Torch's table of what the stand-ins of its parts have kept; what no reader needs is left out."""
    from torch.distributed.checkpoint import filesystem, metadata

    def size(made: Any) -> torch.Size:
        return torch.Size(made.arguments[0])

    def entry(made: Any) -> Any:
        if type(made).__name__ == "BytesStorageMetadata":
            return metadata.BytesStorageMetadata()
        boxes = [{name: size(value) for name, value in chunk.state.items()} for chunk in made.state["chunks"]]
        return metadata.TensorStorageMetadata(
            properties=metadata.TensorProperties(dtype=made.state["properties"].state[0]),
            size=size(made.state["size"]),
            chunks=[metadata.ChunkStorageMetadata(**box) for box in boxes],
        )

    def index(made: Any) -> Any:
        offset = made.state.get("offset")
        return metadata.MetadataIndex(made.state["fqn"], None if offset is None else size(offset), made.state["index"])

    def place(made: Any) -> Any:
        name = made.state["relative_path"]
        if Path(name).name != name:
            raise CheckpointError(f"it points outside itself, to {name!r}")
        return filesystem._StorageInfo(**made.state)

    return metadata.Metadata(
        state_dict_metadata={name: entry(made) for name, made in state["state_dict_metadata"].items()},
        storage_data={index(key): place(made) for key, made in state["storage_data"].items()},
    )


def _unreadable_table(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} has an unreadable {_TABLE_OF_CONTENTS} ({error!r}); use an earlier one")


def _lengths_needed(path: Path) -> dict[str, int]:
    """Bytes that each data file must have, as the table of contents says."""
    needed: dict[str, int] = defaultdict(int)
    table = read_table(path)
    try:
        for place in table.storage_data.values():
            needed[place.relative_path] = max(needed[place.relative_path], place.offset + place.length)
    except Exception as error:
        raise _unreadable_table(path, error) from None
    return needed


def _check_file(path: Path, name: str, length: int) -> None:
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {name}: it is damaged; use an earlier one")
    size = file.stat().st_size
    if size < length:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {name} has {size} bytes and must have {length}; use an earlier one"
        )


def load_plain(file: Path) -> Any:
    """Read a torch file of plain data: numbers, strings, containers and tensors.

    Raises:
        CheckpointError: If the file holds anything else, or is damaged.
    """
    try:
        stream = io.BytesIO(file.read_bytes())
        check_not_packed(stream)
        value = torch.load(stream, map_location="cpu", weights_only=True)
        _check_not_folded(value, _MOST_ITEMS + _MOST_ITEMS_OF_A_BYTE * len(stream.getbuffer()))
        return value
    except CheckpointError as error:
        raise CheckpointError(f"{file} is not loaded: {error}; do not trust its source") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file} is not loaded: {more_than_data(error)}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: the checkpoint is damaged; use an earlier one") from None
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError ... on damaged archives
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}); use an earlier checkpoint") from None


def check_not_packed(file: io.BytesIO) -> None:
    """Raise if a file of ``torch.save`` would take much more memory than it has bytes.

    Args:
        file: With its content in memory; left at its beginning.

    Raises:
        CheckpointError: If members of a zip file are compressed, or lie in each other, which torch never writes; or if
            it makes an array of bytes, of whatever length it says, which our own files do not.
    """
    content = file.getvalue()
    if any(name in content for name in _BYTEARRAY):
        raise CheckpointError("it would reserve memory for a bytearray")
    if zipfile.is_zipfile(file):  # else of torch before 1.6, which compresses nothing
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
        total = sum(member.file_size for member in members)
        if total > len(content) or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(f"its {len(content):,} bytes would become {total:,} in memory")
    file.seek(0)


def _check_not_folded(value: Any, limit: int) -> None:
    """Raise if containers hold each other so that whoever goes through them, or prints them, comes to no end."""
    left: list[tuple[Any, int]] = [([value], 0)]
    count = 0
    while left:
        container, depth = left.pop()
        items: Collection[Any] = container.values() if isinstance(container, dict) else container
        count += len(items)
        if depth > _DEEPEST or count > limit:
            raise CheckpointError("its containers hold each other without end")
        left += [(item, depth + 1) for item in items if isinstance(item, (dict, list, tuple, set))]


def more_than_data(error: pickle.UnpicklingError) -> str:
    """What a file holds that torch refused; torch's own text advises to load it nevertheless."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it holds more than data ({found.group(1)})" if found else "it holds more than data, or is damaged"
