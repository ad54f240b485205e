"""Files of a legacy checkpoint of Megatron-LM: one pickle per rank, in directories or a zip file."""

from __future__ import annotations

import itertools
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torch import Tensor

from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.convert.source import NO_WEIGHTS
from lightning_megatron.errors import CheckpointError

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""Name of a rank's file; the second one with the distributed optimizer of 2022."""
_MAX_NAMES = 5
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Tracker file: contains the last saved iteration, or ``release``."""

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d{0,9})")
_MAX_EXPANSION = 20
"""Maximum ratio of unpacked to packed bytes of a zip file; weights hardly compress."""
_ZIP_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""Exceptions raised by reading damaged zip files."""

Rank = tuple[int, int]
"""(tensor-parallel rank, pipeline-parallel rank)."""


class RankState(NamedTuple):
    """Content of the file of one rank; its tensors are memory-mapped, not read."""

    metadata: Mapping[str, Any]
    """Entries other than weights: ``args`` (not in the oldest files), ``checkpoint_version``, ``iteration``, ..."""
    version: float
    """Checkpoint version, which determines the row order of the fused QKV weight."""
    chunks: tuple[Mapping[str, Tensor], ...]
    """Weights of each model chunk by flat name, in the order of the file."""


def rank_folder(tensor: int, stage: int, pp: int) -> str:
    """Name of a rank's directory."""
    if pp == 1:
        return f"mp_rank_{tensor:02d}"
    return f"mp_rank_{tensor:02d}_{stage:03d}"


def _rank_files(path: Path) -> dict[Rank, Path]:
    """Model file of each rank in a directory, or the given file; directories without one hold optimizer state only."""
    if path.is_file():
        return {(0, 0): path}
    folders: dict[Rank, Path] = {}
    for folder in sorted(path.glob("mp_rank_*")):
        match = _RANK.fullmatch(folder.name)
        if match:
            folders[int(match[1]), int(match[2] or 0)] = folder
    files: dict[Rank, Path] = {}
    if not folders:
        folders[0, 0] = path
    for rank, folder in folders.items():
        for name in MODEL_FILES:
            if (folder / name).is_file():
                files[rank] = folder / name
                break
    return files


def is_legacy(path: Path) -> bool:
    """Whether ``path`` looks like a legacy checkpoint; the content of a file is not checked."""
    if path.is_file():
        return path.suffix in (".pt", ".zip")
    return bool(_rank_files(path))


def layout_of_ranks(ranks: Collection[Rank]) -> tuple[int, int]:
    """(tp, pp) of the checkpoint with these ranks."""
    tensors, stages = zip(*ranks, strict=True)
    return 1 + max(tensors), 1 + max(stages)


def read_ranks(path: Path) -> dict[Rank, RankState]:
    """Open the files of all ranks of a checkpoint in a directory, file or zip archive.

    An archive is unpacked into temporary files, which stay mapped; paths in the archive are not used as paths on disk.

    Raises:
        CheckpointError: If there is no checkpoint, or a rank is missing, damaged or unsafe.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as temporary:
        unpacked = path
        if path.is_file() and path.suffix == ".zip":
            unpacked = _unpack(path, Path(temporary))
        files = _rank_files(unpacked)
        if not files:
            raise CheckpointError(
                f"{path} is no checkpoint of Megatron-LM: it has no directories mp_rank_TT[_PPP] with {MODEL_FILES[0]}"
            )
        tp, pp = layout_of_ranks(files)
        # Compared before any loop over ranks: a number in a name can be huge.
        if len(files) < tp * pp:
            ranks = itertools.product(range(tp), range(pp))
            absent = next(rank for rank in ranks if rank not in files)
            raise CheckpointError(
                f"{path} lacks the file of {rank_folder(*absent, pp)}: there are {len(files)} of tp={tp} x pp={pp}; "
                "copy the whole checkpoint"
            )
        return {rank: _read_rank(file) for rank, file in files.items()}


def _unpack(archive: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            num_bytes = sum(info.file_size for info in opened.infolist())
            if num_bytes > _MAX_EXPANSION * archive.stat().st_size:
                raise OSError(f"its members would take {num_bytes:,} bytes")
            for info in opened.infolist():
                member = PurePosixPath(info.filename)
                if member.name not in MODEL_FILES:
                    continue
                name = member.parent.name
                rank = folder / (name if _RANK.fullmatch(name) else "mp_rank_00")
                rank.mkdir()
                with opened.open(info) as source, (rank / MODEL_FILES[0]).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 24)
    except FileExistsError:
        raise CheckpointError(
            f"zip file {archive} has several checkpoints; unpack it, and give one of them"
        ) from None
    except _ZIP_ERRORS as error:
        raise CheckpointError(
            f"zip file {archive} cannot be unpacked ({error}); fetch it again"
        ) from None
    return folder


def _read_rank(file: Path) -> RankState:
    """Open the file of one rank.

    Raises:
        CheckpointError: If the file is damaged, could run code, or is no checkpoint of Megatron-LM.
    """
    state = read_pickle(file)
    if not isinstance(state, Mapping):
        state = {}
    models: dict[int, Any] = {}
    metadata: dict[str, Any] = {}
    for key, value in state.items():
        match = _CHUNK.fullmatch(str(key))
        if match:
            models[int(match[1] or 0)] = value
        else:
            metadata[str(key)] = value
    chunks = tuple(dict(_flatten(models.get(index))) for index in range(len(models)))
    version = state.get("checkpoint_version", 0)
    if not chunks or not all(chunks) or type(version) not in (int, float):
        names = [repr(str(name)[:40]) for name in list(state)[:_MAX_NAMES]]
        named = ", ".join(names) or "nothing"
        raise CheckpointError(
            f"{file}: expected a file of Megatron-LM ('model' or 'model0', 'model1', ... with tensors in it, and a "
            f"number as checkpoint_version), got {named}; give another file"
        )
    return RankState(metadata, float(version), chunks)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten(child, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor) and not NO_WEIGHTS.search(name):
        yield name, value
