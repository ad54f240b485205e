"""The files of a checkpoint: finding complete ones, and reading without running code.

What has the right name may be a link to a checkpoint that was never finished, and the right one may have another name:
a run can be killed between any two of the steps that save, link and remove. Nothing is repaired here; the next save
puts the names in order.

Torch's distributed checkpoints keep their table of contents in a pickle, which torch loads without restriction: here
its names become stand-ins that do nothing, and the table is made anew from what they have kept. Other files are read by
``engine/pickles.py``; the rest about them is in ``lightning_megatron/files.py``.

Nothing here communicates or imports Megatron.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from lightning_megatron.engine.pickles import StandIn, read_pickle, stand_in
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import (
    CHECKSUMS,
    COMPLETE_MARKER,
    PARTIAL,
    as_path,
    failures_as_errors,
    is_remote,
    recover,
    require_file,
)

META = COMPLETE_MARKER
"""Lightning's own state and the description of the run; written last, so its presence means "complete"."""

FORMAT_VERSION = 1
"""Of the folder as a whole; another number is refused."""
_OWN_KEYS = {"format_version", "layout", "has_optimizer", "optimizer_format", "model_description", "lightning"}
"""What ``meta.pt`` always holds."""

COMMON = "common.pt"
"""What Megatron does not shard: parameter groups and step counts."""

TABLE = ".metadata"
"""Torch's table of contents."""
BACKENDS = "metadata.json"
"""By which Megatron's own loader picks the code that reads the rest."""

KNOWN_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What ``metadata.json`` says; from megatron-core 0.17 on without the common ones."""

# ---- completeness ---------------------------------------------------------------------------------------------------


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint of Megatron-Core, of ours or of another program."""
    return (path / TABLE).is_file() and (path / BACKENDS).is_file()


def check_complete(path: Path) -> None:
    """Raise unless ``path`` is a finished checkpoint directory of ours.

    Raises:
        CheckpointError: If it is missing, is not a directory, or was never finished.
    """
    if not path.is_dir():
        what = "is a file, not a directory that this strategy wrote" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}; give the path of a *.ckpt directory")
    for name in (META, TABLE, BACKENDS, COMMON, CHECKSUMS):
        require_file(path / name)


def check_backends(path: Path) -> None:
    """Refuse distributed checkpoints of other formats, as Megatron-Core once wrote them.

    Raises:
        CheckpointError: If the format is another one, or cannot be read.
    """
    try:
        found = json.loads((path / BACKENDS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        found = repr(error)
    told = found if isinstance(found, dict) else {}
    if (told.get("sharded_backend"), told.get("common_backend", "torch")) != ("torch_dist", "torch"):
        raise CheckpointError(
            f"checkpoint {path} has an unreadable {BACKENDS}: expected {KNOWN_BACKENDS}, got {found}; give another"
        )


# ---- plain data -----------------------------------------------------------------------------------------------------


def load_plain(file: Path) -> Any:
    """Read a torch file of plain data: numbers, strings, containers and tensors.

    Raises:
        CheckpointError: If the file holds anything else, or is damaged.
    """
    require_file(file)
    return read_pickle(io.BytesIO(file.read_bytes()) if is_remote(file) else file, foreign=False, name=str(file))


def load_meta(path: Path) -> dict[str, Any]:
    """``meta.pt`` of a checkpoint.

    Raises:
        CheckpointError: If another program wrote it, or another version of this one.
    """
    meta = load_plain(path / META)
    if not isinstance(meta, dict) or not meta.keys() >= _OWN_KEYS:
        raise CheckpointError(f"checkpoint {path} was written by another strategy; give one of MegatronStrategy's")
    if (version := meta["format_version"]) != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path}: format version {version}, this program reads {FORMAT_VERSION}; use its own"
        )
    return meta


# ---- the table of contents ------------------------------------------------------------------------------------------

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


def read_table(path: Path) -> Any:
    """The table of contents of a distributed checkpoint, a ``torch.distributed.checkpoint.metadata.Metadata``.

    Raises:
        CheckpointError: If it names anything but what such a table consists of, points outside the checkpoint, or
            cannot be read.
    """
    try:
        kept = _TableUnpickler(io.BytesIO((path / TABLE).read_bytes())).load().state
        entries, places = (_real(kept[name]) for name in ("state_dict_metadata", "storage_data"))
        for name in (place.relative_path for place in places.values()):
            if Path(name).name != name:
                raise CheckpointError(f"it points outside itself, to {name!r}")
        return metadata.Metadata(state_dict_metadata=entries, storage_data=places)  # what no reader needs is left out
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is not loaded: {error}; do not trust its source") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"checkpoint {path} has an unreadable {TABLE} ({error!r}); use an earlier one") from None


_PARTS = (
    *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorStorageMetadata),
    *(metadata.MetadataIndex, filesystem._StorageInfo),
)


def _real(made: Any) -> Any:
    """What the stand-ins of a table's parts have kept, as torch's own parts."""
    if isinstance(made, dict):
        return {_real(key): _real(value) for key, value in made.items()}
    if isinstance(made, list):
        return [_real(each) for each in made]
    if not isinstance(made, StandIn):
        return made
    name = type(made).__name__
    if name == "Size":
        return torch.Size(made.arguments[0])
    if name == "TensorProperties":
        return metadata.TensorProperties(dtype=made.state[0])
    part = next(each for each in _PARTS if each.__name__ == name)
    return part(**_real(made.state or {}))


def table_reader(path: Path, table: metadata.Metadata) -> filesystem.FileSystemReader:
    """Torch's reader of shards, on a disk or in a store, for a table of contents that was checked while it was read."""
    reader = (FsspecReader if is_remote(path) else filesystem.FileSystemReader)(str(path))
    reader.read_metadata = lambda *_, **__: table  # type: ignore[method-assign]
    reader.set_up_storage_reader(table, is_coordinator=False)
    return reader


# ---- finding --------------------------------------------------------------------------------------------------------

ENDING = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    path: Path
    step: int
    """Optimizer steps that it has behind it."""
    time: float
    """When it was saved, in seconds of the epoch."""
    has_optimizer: bool = True
    """Whether training can go on from it; False for ``save_weights_only``."""


def check_writable(folders: Iterable[Path]) -> None:
    """Raise if checkpoints surely cannot be saved in one of ``folders``, which need not exist yet.

    Raises:
        CheckpointError: If it, or what is there of the path to it, is no folder or must not be written; in a store, if
            this rank cannot write and delete a file there.
    """
    for folder in folders:
        if is_remote(folder):
            with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
                probe = folder / f".can_be_written_{uuid.uuid4().hex}"
                probe.write_bytes(b"")
                probe.unlink()
            continue
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            obstacle = "read-only" if there.is_dir() else "no folder"
            raise CheckpointError(
                f"checkpoints cannot be saved in {folder}: {there} is {obstacle}; give another dirpath"
            )


def is_complete(path: Path) -> bool:
    """Whether ``path``, or what an interrupted save left of it, is a complete checkpoint."""
    try:
        check_complete(recover(path))
    except CheckpointError:
        return False
    return True


def list_checkpoints(folder: Path) -> list[Path]:
    """Links among them, and those of which only what an interrupted save left beside them is there."""
    present = [path.name.partition(ENDING) for path in folder.iterdir()] if folder.is_dir() else []
    return [folder / name for name in sorted({stem + ending for stem, ending, _ in present if ending})]


def find_complete(places: Iterable[Path], *, to_resume: bool = False) -> tuple[list[CheckpointInfo], list[Path]]:
    """The complete checkpoints among ``places``, and those that are damaged or foreign.

    A link to one that was being written when its run was killed is neither, and so is what is not there.

    Args:
        places: Where to look.
        to_resume: Leave out those that have only weights, unless there are no others.
    """
    found: list[CheckpointInfo] = []
    others: list[Path] = []
    for path in places:
        try:
            check_complete(recover(path))
            found.append(_described(path))
        except (CheckpointError, FileNotFoundError) as error:
            if is_complete(path):  # else another process may have removed it meanwhile
                rank_zero_warn(f"{error}. It is passed over, though its folder has all files")
            was_begun = path.is_symlink() and Path(f"{path.resolve()}{PARTIAL}").exists()
            if (path.is_symlink() or path.exists()) and not was_begun:
                others.append(path)
    whole = [each for each in found if each.has_optimizer]
    return (whole if to_resume and whole else found), others


def find_newest(path: str | Path, step: int | None = None, *, to_resume: bool = False) -> CheckpointInfo:
    """The checkpoint ``path``, or the one with most steps in the folder ``path``.

    Args:
        path: A checkpoint or a folder of some.
        step: The one of the folder to take instead, or the step that the checkpoint must be of.
        to_resume: Take one with only weights if the folder has no other.

    Raises:
        CheckpointError: If there is none.
    """
    path = as_path(os.path.expanduser(str(path))).absolute()  # no shell has read what stands in a YAML file
    own = recover(path)
    others: list[Path] = []
    if (own / META).is_file() or not own.is_dir():
        check_complete(own)
        found = [_described(path)]
    else:
        found, others = find_complete(list_checkpoints(path), to_resume=to_resume)
    if of_step := [each for each in found if step in (None, each.step)]:
        return newest(of_step)
    if found:
        steps = ", ".join(str(step) for step in sorted({each.step for each in found}))
        raise CheckpointError(f"{path} has no complete checkpoint of step={step}; those it has: {steps}")
    if (program := _other_program(path)) is not None:
        raise CheckpointError(f"{path} is {program}; convert it with `lightning-megatron convert`")
    if others:
        names = ", ".join(each.name for each in others)
        raise CheckpointError(f"none of the checkpoints in {path} is complete: {names}; give another path")
    check_complete(path)
    return _described(path)


def newest(found: Iterable[CheckpointInfo]) -> CheckpointInfo:
    """The one with most steps, and of those the last one saved."""
    return max(found, key=lambda each: (each.step, each.time))


def is_checkpoint_within(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` really lies in one of ``folders``, and is a complete checkpoint, a link to one, or nothing.

    A path that a loaded state names may lead anywhere: ``checkpoints/../../documents``.
    """
    place = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    if not any(folder.resolve() in place.parents for folder in folders):
        return False
    return not recover(path.resolve()).exists() or is_complete(path.resolve())


def _described(path: Path) -> CheckpointInfo:
    meta = recover(path) / META
    state = load_plain(meta)
    known = state if isinstance(state, dict) else {}
    return CheckpointInfo(
        path=path,
        step=int(known.get("lightning", {}).get("global_step", 0)),
        time=float(known.get("time", meta.stat().st_mtime)),  # a copy has another mtime
        has_optimizer=bool(known.get("has_optimizer", True)),
    )


def _other_program(path: Path) -> str | None:
    if (path / "config.json").is_file():
        return "a model of Hugging Face"
    if is_distributed(path) and path.suffix != ENDING:  # one of ours that lost its meta.pt is damaged
        return "a checkpoint that another program wrote with Megatron-Core"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")):
        return "a checkpoint of Megatron-LM"
    return None
