"""Checks that a checkpoint is complete and only data, before any of it reaches a loader that could run code.

Torch's distributed checkpoints keep their table of contents in a pickle, which torch loads without restriction. Here
its names become stand-ins that do nothing, and the table is made anew from what they have kept. Torch gets that one.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.engine.pickles import read_pickle, stand_in
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


class _TableUnpickler(pickle.Unpickler):
    """Finds stand-ins for what the table of contents of a distributed checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if _TABLE_NAMES.fullmatch(f"{module}.{name}"):
            return stand_in(f"{module}.{name}")
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
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the checkpoint is damaged; use an earlier one")
    return read_pickle(file, foreign=False)
