"""Files of a checkpoint: finding complete checkpoints, and reading them without running code.

A name may be a link to a checkpoint that was never finished, and a complete checkpoint may have another name: a run can
be killed between any two of the steps that save, link and remove. Nothing is repaired here; the next save restores the
names.

Torch's distributed checkpoints store their table of contents in a pickle, which torch loads without restriction. Here
the names in it become stand-ins that do nothing, and the table is rebuilt from what they keep. Other files are read by
``pickles.py``; publication and checksums are in ``storage/``.

Nothing here communicates or imports Megatron.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from lightning_megatron.checkpoint.pickles import (
    StandIn,
    check_archive,
    read_pickle,
    scan_pickle,
    stand_in,
)
from lightning_megatron.checkpoint.schema import check_meta
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.checksums import CHECKSUMS, require_file
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import as_path, is_remote
from lightning_megatron.storage.publish import PARTIAL, recover
from lightning_megatron.storage.stores import COMPLETE_MARKER

META = COMPLETE_MARKER
"""Lightning's own state and the description of the run; written last, so its presence marks a complete checkpoint."""

FORMAT_VERSION = 1
"""Version of the checkpoint format; other versions are refused."""
_REQUIRED_KEYS = {
    "format_version",
    "layout",
    "has_optimizer",
    "optimizer_format",
    "model_description",
    "lightning",
}
"""Keys that ``meta.pt`` always has."""

COMMON = "common.pt"
"""State that Megatron does not shard: parameter groups and step counts."""

TABLE = ".metadata"
"""Torch's table of contents of the shards."""
BACKENDS = "metadata.json"
"""Names the formats of the other files, by which Megatron's own loader chooses its readers."""

KNOWN_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of ``metadata.json``; without the common backend from megatron-core 0.17 on."""

# ---- completeness ---------------------------------------------------------------------------------------------------


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint of Megatron-Core, ours or another program's."""
    return (path / TABLE).is_file() and (path / BACKENDS).is_file()


def check_complete(path: Path) -> None:
    """Raise unless ``path`` is a complete checkpoint directory of this package.

    Raises:
        CheckpointError: If it is missing, is not a directory, or was never finished.
    """
    if not path.is_dir():
        what = (
            "is a file, not a directory that this strategy wrote"
            if path.exists()
            else "does not exist"
        )
        raise CheckpointError(f"checkpoint {path} {what}; give the path of a *.ckpt directory")
    for name in (META, TABLE, BACKENDS, COMMON, CHECKSUMS):
        require_file(path / name)


def check_backends(path: Path) -> None:
    """Raise if a distributed checkpoint has another format, such as older ones of Megatron-Core.

    Raises:
        CheckpointError: If the format is another one, or cannot be read.
    """
    try:
        found = json.loads((path / BACKENDS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        found = repr(error)
    backends = found if isinstance(found, dict) else {}
    if (backends.get("sharded_backend"), backends.get("common_backend", "torch")) != (
        "torch_dist",
        "torch",
    ):
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
    return read_pickle(
        io.BytesIO(file.read_bytes()) if is_remote(file) else file, foreign=False, name=str(file)
    )


def load_meta(path: Path) -> dict[str, Any]:
    """Read ``meta.pt`` of a checkpoint.

    Raises:
        CheckpointError: If another program wrote it, or a version of this one with another format.
    """
    meta = load_plain(path / META)
    if not isinstance(meta, dict) or not meta.keys() >= _REQUIRED_KEYS:
        raise CheckpointError(
            f"checkpoint {path} was written by another strategy; give one of MegatronStrategy's"
        )
    if (version := meta["format_version"]) != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path}: format version {version}, this program reads {FORMAT_VERSION}; use its own version"
        )
    check_meta(meta, path)
    return meta


# ---- the table of contents ------------------------------------------------------------------------------------------

_TABLE_NAMES = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|planner|filesystem)\.\w+|torch\.(Size|serialization\._get_layout)"
    r"|collections\.OrderedDict|pathlib\.(_local\.)?PosixPath|builtins\.getattr"
)
"""Names of all classes in a table of contents, besides dtypes (torch 2.10 to 2.13), and the function by which Python
3.11.0 to 3.11.3 pickle a member of an enumeration."""


class _TableUnpickler(pickle.Unpickler):
    """Unpickler of tables of contents: replaces their classes by stand-ins, and refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if _TABLE_NAMES.fullmatch(f"{module}.{name}"):
            return stand_in(f"{module}.{name}")
        raise CheckpointError(f"it would run {module}.{name} when loaded")


def read_table(path: Path) -> Any:
    """Read the table of contents of a distributed checkpoint: a ``torch.distributed.checkpoint.metadata.Metadata``.

    Raises:
        CheckpointError: If it names anything but the classes of such a table, points outside the checkpoint, or cannot
            be read.
    """
    try:
        content = io.BytesIO((path / TABLE).read_bytes())
        scan_pickle(content)
        content.seek(0)
        state = _TableUnpickler(content).load().state
        entries, locations = (
            _rebuild(state[name], {}) for name in ("state_dict_metadata", "storage_data")
        )
        for location in locations.values():
            if Path(location.relative_path).name != location.relative_path:
                raise CheckpointError(f"it points outside itself, to {location.relative_path!r}")
            if location.transform_descriptors:  # torch would decompress it, to whatever size
                raise CheckpointError(f"it has a compressed entry in {location.relative_path}")
        return metadata.Metadata(
            state_dict_metadata=entries, storage_data=locations
        )  # all that readers need
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path} is not loaded: {error}; do not trust its source"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(
            f"checkpoint {path} has an unreadable {TABLE} ({error!r}); use an earlier one"
        ) from None


_TABLE_CLASSES = (
    *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorStorageMetadata),
    *(metadata.MetadataIndex, filesystem._StorageInfo),
)


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
    kind = next(kind for kind in _TABLE_CLASSES if kind.__name__ == name)
    return kind(**_rebuild(node.state or {}, rebuilt))


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
        for index in {
            item.storage_index for item in plan.items if item.type == LoadItemType.TENSOR
        }:
            entry = self.storage_data[index]
            with self.fs.create_stream(
                self.fs.concat_path(self.path, entry.relative_path), "rb"
            ) as stream:
                check_archive(
                    stream, entry.offset, entry.length, f"{index.fqn} in {entry.relative_path}"
                )
        reading: Future[None] = super().read_data(plan, planner)  # type: ignore[misc]
        return reading


class _FileReader(_CheckedReads, filesystem.FileSystemReader):
    pass


class _StoreReader(_CheckedReads, FsspecReader):
    pass


def table_reader(path: Path, table: metadata.Metadata) -> filesystem.FileSystemReader:
    """Torch's reader of shards, on a disk or in an object store, for a table of contents of ``read_table``."""
    reader = (_StoreReader if is_remote(path) else _FileReader)(str(path))
    reader.read_metadata = lambda *_, **__: table  # type: ignore[method-assign]
    reader.set_up_storage_reader(table, is_coordinator=False)
    return reader


# ---- finding --------------------------------------------------------------------------------------------------------

SUFFIX = ".ckpt"


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Place of a checkpoint among those of its run, in the order in which they were written, whatever clocks say.

    A run begins a *line*. Each start that resumes from a checkpoint continues the line of that checkpoint, also if the
    line had gone on from there, and gets a higher number than every start whose checkpoints are beside its own.
    """

    line: str
    """Identifies the line; drawn at its first start."""
    start: int
    """Number of the start, from 1."""
    save: int = 0
    """Number of the save within the start, from 1; 0 before the first."""

    @classmethod
    def new(cls) -> Self:
        """Position before the first save of a new line."""
        return cls(line=uuid.uuid4().hex, start=1)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Self | None:
        """Position that ``meta.pt`` has; None for checkpoints without one, as those of older versions."""
        saved = meta.get("position")
        if not isinstance(saved, Mapping):
            return None
        line = saved.get("line")
        start = saved.get("start")
        save = saved.get("save")
        if isinstance(line, str) and isinstance(start, int) and isinstance(save, int):
            return cls(line=line, start=start, save=save)
        return None

    @property
    def order(self) -> tuple[int, int]:
        """Key by which positions of one line are sorted."""
        return self.start, self.save


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    path: Path
    step: int
    """Number of optimizer steps before it was saved."""
    time: float
    """When it was saved, in seconds since the epoch."""
    has_optimizer: bool = True
    """Whether training can resume from it; False for ``save_weights_only``."""
    position: RunPosition | None = None
    """Place among the checkpoints of its run; None if it was written by an older version, or by no run."""


def check_reachable(folders: Iterable[Path]) -> None:
    """Raise if the object store of one of ``folders`` cannot be asked; writes nothing.

    Raises:
        CheckpointError: If the store refuses, or does not answer.
    """
    for folder in folders:
        with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
            folder.exists()


def check_writable(folders: Iterable[Path]) -> None:
    """Raise if it is certain that checkpoints cannot be saved in one of ``folders``, which need not exist yet.

    In an object store this writes and deletes a file, and the directory comes and goes with it: call it while no other
    process lists the directory.

    Raises:
        CheckpointError: If it, or its nearest parent that exists, is not a writable directory; in an object store, if
            this rank cannot write and delete a file there.
    """
    for folder in folders:
        if is_remote(folder):
            with failures_as_errors(f"checkpoints cannot be saved in {folder}"):
                probe = folder / f".can_be_written_{uuid.uuid4().hex}"
                probe.write_bytes(b"")
                probe.unlink()
            continue
        existing = next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
        )
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            obstacle = "read-only" if existing.is_dir() else "not a directory"
            raise CheckpointError(
                f"checkpoints cannot be saved in {folder}: {existing} is {obstacle}; give another dirpath"
            )


def is_complete(path: Path) -> bool:
    """Whether ``path``, or what an interrupted save left of it, is a complete checkpoint."""
    try:
        check_complete(recover(path))
    except CheckpointError:
        return False
    return True


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a directory, including links and those that an interrupted save left under other names."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except FileNotFoundError:  # a directory of a store is gone as soon as its last file is
        paths = []
    present = [path.name.partition(SUFFIX) for path in paths]
    return [
        folder / name for name in sorted({stem + suffix for stem, suffix, _ in present if suffix})
    ]


def was_never_finished(path: Path) -> bool:
    """Whether ``path`` is in an object store and lacks the file that is written last.

    On a disk such a checkpoint has another name until it is complete; a store has no renames.
    """
    return is_remote(path) and not (recover(path) / META).is_file()


def find_complete(
    paths: Iterable[Path], *, to_resume: bool = False
) -> tuple[list[CheckpointInfo], list[Path]]:
    """Complete checkpoints among ``paths``, and in a second list damaged and foreign ones.

    Links to a checkpoint that was being written when its run was killed, and paths that do not exist, are left out.

    Args:
        paths: Paths of checkpoints.
        to_resume: Leave out those with weights only, unless there are no others.
    """
    found: list[CheckpointInfo] = []
    others: list[Path] = []
    for path in paths:
        try:
            check_complete(recover(path))
            found.append(_checkpoint_info(path))
        except (CheckpointError, FileNotFoundError) as error:
            if is_complete(path):  # otherwise another process may have removed it
                rank_zero_warn(f"{error}. It is passed over, though all its files are there")
            was_begun = path.is_symlink() and Path(f"{path.resolve()}{PARTIAL}").exists()
            if (path.is_symlink() or path.exists()) and not was_begun:
                others.append(path)
    resumable = [info for info in found if info.has_optimizer]
    return (resumable if to_resume and resumable else found), others


def find_newest(
    path: str | Path, step: int | None = None, *, to_resume: bool = False
) -> CheckpointInfo:
    """The checkpoint ``path``, or the one with most steps in the directory ``path``.

    Args:
        path: A checkpoint or a directory of some.
        step: Step of the checkpoint to take from the directory, or that the checkpoint must have.
        to_resume: Take one with weights only if the directory has no other.

    Raises:
        CheckpointError: If there is none.
    """
    path = as_path(
        os.path.expanduser(str(path))
    ).absolute()  # no shell has expanded a path in a YAML file
    recovered = recover(path)
    others: list[Path] = []
    if (recovered / META).is_file() or not recovered.is_dir():
        check_complete(recovered)
        found = [_checkpoint_info(path)]
    else:
        found, others = find_complete(list_checkpoints(path), to_resume=to_resume)
    if candidates := [each for each in found if step in (None, each.step)]:
        return newest(candidates)
    if found:
        steps = ", ".join(str(step) for step in sorted({each.step for each in found}))
        raise CheckpointError(
            f"{path} has no complete checkpoint of step={step}; those it has: {steps}"
        )
    if (kind := _foreign_kind(path)) is not None:
        raise CheckpointError(f"{path} is {kind}; convert it with `lightning-megatron convert`")
    if others:
        names = ", ".join(each.name for each in others)
        raise CheckpointError(
            f"none of the checkpoints in {path} is complete: {names}; give another path"
        )
    check_complete(path)
    return _checkpoint_info(path)


def newest(found: Iterable[CheckpointInfo]) -> CheckpointInfo:
    """The checkpoint with most steps; among several, the last one saved."""
    candidates = list(found)
    most_steps = max(each.step for each in candidates)
    return last_saved(each for each in candidates if each.step == most_steps)


def last_saved(found: Iterable[CheckpointInfo]) -> CheckpointInfo:
    """The checkpoint that was saved last: within a line of starts by its counters, otherwise by the clock.

    A host's clock may be wrong, and a run that went back to an older checkpoint has written fewer steps since. Of
    several equal ones, such as a link and its target, the first is taken.
    """
    last_of_lines: dict[str, CheckpointInfo] = {}
    for each in found:
        line = str(each.path) if each.position is None else each.position.line
        last = last_of_lines.setdefault(line, each)
        if is_later(each, last):
            last_of_lines[line] = each
    return max(last_of_lines.values(), key=lambda each: each.time)


def is_later(one: CheckpointInfo, other: CheckpointInfo) -> bool:
    """Whether two checkpoints are of the same line, and ``one`` was written after ``other``."""
    if one.position is None or other.position is None:
        return False
    return one.position.line == other.position.line and one.position.order > other.position.order


def continued(position: RunPosition, beside: Iterable[Path]) -> RunPosition:
    """Position of a start that resumes from a checkpoint at ``position``.

    Args:
        position: Of the checkpoint.
        beside: Paths of checkpoints, of which the start must follow those of the same line; others are ignored.
    """
    start = position.start
    for path in beside:
        try:
            other = _checkpoint_info(path).position
        except (CheckpointError, FileNotFoundError):  # damaged, unfinished or just removed
            continue
        if other is not None and other.line == position.line:
            start = max(start, other.start)
    return RunPosition(line=position.line, start=start + 1)


def is_checkpoint_within(path: Path, folders: Iterable[Path]) -> bool:
    """Whether ``path`` resolves into one of ``folders`` and is a complete checkpoint, a link to one, or nothing.

    A path from a loaded state may lead anywhere: ``checkpoints/../../documents``.
    """
    resolved = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    if not any(folder.resolve() in resolved.parents for folder in folders):
        return False
    return not recover(path.resolve()).exists() or is_complete(path.resolve())


def _checkpoint_info(path: Path) -> CheckpointInfo:
    meta = recover(path) / META
    state = load_plain(meta)
    content = state if isinstance(state, dict) else {}
    if content.keys() >= _REQUIRED_KEYS:
        check_meta(content, path)
    return CheckpointInfo(
        path=path,
        step=int(content.get("lightning", {}).get("global_step", 0)),
        time=float(content.get("time", meta.stat().st_mtime)),  # a copy has another mtime
        has_optimizer=bool(content.get("has_optimizer", True)),
        position=RunPosition.of(content),
    )


def _foreign_kind(path: Path) -> str | None:
    if (path / "config.json").is_file():
        return "a model of Hugging Face"
    if (
        is_distributed(path) and path.suffix != SUFFIX
    ):  # one of ours that lost its meta.pt is damaged
        return "a checkpoint that another program wrote with Megatron-Core"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*")):
        return "a checkpoint of Megatron-LM"
    return None
