"""Which files is a legacy checkpoint made of, and which tensor- and pipeline-parallel rank wrote each?

Known are a folder with ``latest_checkpointed_iteration.txt``, one of its iterations (``iter_0000500``, ``release``),
the folder of one rank, its file, and zip files with any of these inside, as NVIDIA publishes them.
"""

from __future__ import annotations

import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.convert.iterations import iteration_folder
from lightning_megatron.convert.pickled.pickle_machine import Damaged
from lightning_megatron.convert.pickled.unpickler import FilePart, member_part
from lightning_megatron.errors import CheckpointError

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""What a rank's file is called; the second one with the distributed optimizer of 2022."""

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_RANK_OF_MORE = re.compile(r"mp_rank_\d{2,}(_\d{3,}){2,}")
_COPIED_AT_ONCE = 1 << 24
_OF_DAMAGED_ZIP_FILES = (
    OSError,
    EOFError,
    ValueError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What reading them raises."""
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """The files of one checkpoint."""

    path: Path
    """The folder, or the file if there is only one."""
    tp: int
    pp: int
    parts: Mapping[tuple[int, int], FilePart]
    """Of each tensor- and pipeline-parallel rank."""
    temporary: tempfile.TemporaryDirectory[str] | None = None
    """What had to be unpacked; gone with this object."""

    def rank_name(self, tensor: int, stage: int) -> str:
        """The folder of a rank, for messages."""
        return f"mp_rank_{tensor:02d}" if self.pp == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def is_legacy(path: Path) -> bool:
    """Whether ``path`` looks like a legacy checkpoint, in any of the known forms."""
    if path.is_file():
        return path.suffix == ".pt" or (path.suffix == ".zip" and _is_archive_of_ranks(path))  # one file has any name
    if not path.is_dir():
        return False
    return bool(_files_of_ranks(path)) or any((path / name).is_file() for name in MODEL_FILES)


def find_files(path: Path, iteration: int | None = None) -> RankFiles:
    """The files of the checkpoint at ``path``.

    Args:
        path: See above.
        iteration: Which one below a folder of several; None for that of the tracker file.

    Raises:
        CheckpointError: If there is none, or a rank is missing.
    """
    if path.is_file():
        if zipfile.is_zipfile(path) and _is_archive_of_ranks(path):
            return _in_archive(path)
        return RankFiles(path=path, tp=1, pp=1, parts={(0, 0): FilePart.whole(path)})
    folder = iteration_folder(path, iteration)
    own = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    if own:
        _check_alone(folder)
        return RankFiles(path=folder, tp=1, pp=1, parts={(0, 0): FilePart.whole(own[0])})
    found = _files_of_ranks(folder)
    if not found:
        raise CheckpointError(
            f"{path} is no checkpoint of Megatron-LM: it has no folders mp_rank_TT[_PPP] with {MODEL_FILES[0]}"
        )
    more = sorted(each.name for each in folder.iterdir() if _RANK_OF_MORE.fullmatch(each.name))
    if more and any((folder / more[0] / name).is_file() for name in MODEL_FILES):
        raise CheckpointError(f"{folder} has expert-parallel ranks ({more[0]}), which are not read; no family has them")
    parts = {rank: FilePart.whole(file) for rank, file in found.items()}
    return _complete(folder, parts)


def _files_of_ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """The model file of each rank; folders without one are of a distributed optimizer."""
    found = {}
    for each in folder.glob("mp_rank_*"):
        name = _RANK.fullmatch(each.name)
        file = next((each / model for model in MODEL_FILES if (each / model).is_file()), None)
        if name is not None and file is not None:
            found[int(name[1]), int(name[2] or 0)] = file
    return found


def _check_alone(folder: Path) -> None:
    """Raise if ``folder`` is that of one rank among several."""
    if _RANK.fullmatch(folder.absolute().name):
        others = _files_of_ranks(folder.absolute().parent)
        if len(others) > 1:
            raise CheckpointError(
                f"{folder} is one of {len(others)} ranks; give the folder of all of them, {folder.absolute().parent}"
            )


def _complete(path: Path, parts: Mapping[tuple[int, int], FilePart]) -> RankFiles:
    """All of them, unless one is missing."""
    tp, pp = (1 + max(rank[axis] for rank in parts) for axis in (0, 1))
    files = RankFiles(path=path, tp=tp, pp=pp, parts=parts)
    if len(parts) < tp * pp:  # before they are named: a number can be anything
        absent = next((t, p) for t in range(tp) for p in range(pp) if (t, p) not in parts)
        raise CheckpointError(
            f"{path} lacks the file of {files.rank_name(*absent)}: there are {len(parts)} of tp={tp} x pp={pp}; copy "
            "the whole checkpoint"
        )
    return files


# ---- zip files ------------------------------------------------------------------------------------------------------


def _is_archive_of_ranks(path: Path) -> bool:
    """Whether it is a zip file with a rank's file in it; torch's own are zip files, too."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(_members(archive))
    except _OF_DAMAGED_ZIP_FILES:
        return False


def _members(archive: zipfile.ZipFile) -> list[tuple[tuple[int, int], zipfile.ZipInfo]]:
    """The files of ranks: ``anything/mp_rank_TT[_PPP]/model_optim_rng.pt``, or that name without folders."""
    found = []
    for info in archive.infolist():
        *folders, name = info.filename.replace("\\", "/").split("/")
        rank = _RANK.fullmatch(folders[-1]) if folders else None
        if name in MODEL_FILES and (rank is not None or not folders):
            found.append(((int(rank[1]), int(rank[2] or 0)) if rank else (0, 0), info))
    return found


def _check_one_checkpoint(path: Path, members: Sequence[tuple[tuple[int, int], zipfile.ZipInfo]]) -> None:
    """Raise if the zip file has several checkpoints, whose ranks would be mixed."""
    names = sorted(info.filename for _, info in members)
    folders = {name.rpartition("mp_rank_")[0] for name in names}
    if len(folders) > 1 or len({rank for rank, _ in members}) < len(members):
        raise CheckpointError(
            f"zip file {path} has several checkpoints ({', '.join(names[:_MOST_NAMED])}); unpack it, and give the "
            "folder of one"
        )


def _in_archive(path: Path) -> RankFiles:
    """Stored members are read where they are, compressed ones from a temporary copy; names in the zip name no file."""
    whole = FilePart.whole(path)
    temporary: tempfile.TemporaryDirectory[str] | None = None
    parts = {}
    try:
        with path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            members = _members(archive)
            _check_one_checkpoint(path, members)
            for rank, info in members:
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    parts[rank] = member_part(opened, info, whole)
                    continue
                temporary = temporary or tempfile.TemporaryDirectory(prefix="lightning_megatron_")
                parts[rank] = _unpacked(archive, info, Path(temporary.name) / f"{len(parts)}.pt")
    except CheckpointError:
        raise
    except (*_OF_DAMAGED_ZIP_FILES, Damaged, RuntimeError) as error:
        raise CheckpointError(f"zip file {path} cannot be unpacked ({error}); fetch it again") from None
    files = _complete(path, parts)
    return RankFiles(path=path, tp=files.tp, pp=files.pp, parts=parts, temporary=temporary)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> FilePart:
    free = shutil.disk_usage(target.parent).free
    if info.file_size > free:
        raise OSError(f"{info.file_size:,} bytes do not fit into {target.parent}, where {free:,} are free")
    with archive.open(info) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, _COPIED_AT_ONCE)
    return FilePart.whole(target)
