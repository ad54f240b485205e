"""Files of Hugging Face model directories: weights by header, companions (tokenizer, generation config) by name.

Weight files are mapped. Mapped pages count as memory of the process until the file is closed, and a rank would come to
hold its shard twice: so a file is opened anew after some megabytes were read. (For each tensor it would be parsed too
often: reading 361 MB took 0.17 s instead of 0.12.)
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError
from lightning_megatron.hub import TOKENIZER_FILES

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
_PICKLED_FILE = "pytorch_model.bin"
_PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
ENTRY_FILES = (WEIGHTS_FILE, INDEX_FILE, _PICKLED_FILE, _PICKLED_INDEX_FILE)
"""What ``from_pretrained`` looks for first."""
SHARD_FILE = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
"""What safetensors calls the dtypes of torch."""
_MAPPED_BYTES = 16 << 20


class StoredTensor(NamedTuple):
    """One tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    data: torch.Tensor | None = None
    """The tensor in a mapped pickle; None in safetensors."""


class WeightFiles:
    """The tensors of one model directory; their numbers are not read before they are asked for."""

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors
        self._opened: tuple[Path, Any] | None = None
        self._mapped = 0

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, not to be kept: it may be the file's own memory.

        Raises:
            CheckpointError: If the file cannot be read, or ends too early.
        """
        shape, dtype, file, data = self.tensors[name]
        if data is not None:
            return data[box]
        from safetensors import safe_open

        with _damage_as_errors(file):
            if self._opened is None or self._opened[0] != file or self._mapped > _MAPPED_BYTES:
                self._opened, self._mapped = (file, safe_open(file, framework="pt")), 0
            self._mapped += math.prod(shape) * dtype.itemsize
            part: torch.Tensor = self._opened[1].get_slice(name)[box]
            return part

    def are_equal(self, one: str, other: str, part: int = 0, parts: int = 1) -> bool:
        """Whether two tensors are the same, in the ``part``-th of ``parts`` of their rows."""
        shape = self.tensors[one].shape
        rows = (slice(shape[0] * part // parts, shape[0] * (part + 1) // parts),)
        return shape == self.tensors[other].shape and torch.equal(self.read(one, rows), self.read(other, rows))


def has_weights(directory: Path) -> bool:
    """Whether there are weight files where transformers looks for them."""
    return any((directory / name).is_file() for name in ENTRY_FILES)


def directory_of(file: Path) -> Path | None:
    """The model directory that a weight file or its index is a part of; None if ``file`` is none."""
    is_part = file.name in ENTRY_FILES or SHARD_FILE.fullmatch(file.name) is not None
    return file.parent if is_part and file.is_file() and has_weights(file.parent) else None


def open_weights(directory: str | Path) -> WeightFiles:
    """Look at the weight files of ``directory``, safetensors before pickled ones, as transformers does.

    Raises:
        CheckpointError: If there are none, one is missing, damaged or truncated, or holds more than tensors.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist; give a folder with {WEIGHTS_FILE}")
    for single, index, read in (
        (WEIGHTS_FILE, INDEX_FILE, _safetensors),
        (_PICKLED_FILE, _PICKLED_INDEX_FILE, _pickled),
    ):
        if (directory / single).is_file():
            return WeightFiles(directory, read(directory / single))
        if (directory / index).is_file():
            return WeightFiles(directory, _of_index(directory / index, read))
    raise CheckpointError(
        f"model directory {directory} has no weights: none of {', '.join(ENTRY_FILES)}; save them with "
        "save_pretrained, or train from random weights with pretrained=False"
    )


def _of_index(index: Path, read: Callable[[Path], dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    names = _weight_map(index)
    files = [index.parent / file for file in sorted(set(names.values()))]
    if missing := ", ".join(file.name for file in files if not file.is_file()):
        raise CheckpointError(f"{index} names files that are missing: {missing}; fetch them again")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= read(file)
    if absent := ", ".join(name for name in names if name not in tensors):
        raise CheckpointError(f"{index} promises tensors that are in none of its files: {absent}; fetch them again")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each tensor is in; files may not lie outside the folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({error!r}); fetch it again") from None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()) or not names:
        raise CheckpointError(f"the weight_map of {index} does not name a file for each tensor; fetch it again")
    for name, file in names.items():
        path = PurePosixPath(file.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in file or not path.parts:
            raise CheckpointError(
                f"{index} says that {name!r} is in {file!r}, which is outside its folder; do not use this model"
            )
    return names


@contextlib.contextmanager
def _damage_as_errors(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"weights file {file} is truncated or damaged ({error}); fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"weights file {file} cannot be read ({error}); check the disk") from error


def _safetensors(file: Path) -> dict[str, StoredTensor]:
    from safetensors import safe_open

    with _damage_as_errors(file), safe_open(file, framework="pt") as opened:
        headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        if other := next((name for name, each in headers.items() if each.get_dtype() not in _DTYPES), None):
            raise CheckpointError(f"weights file {file} has {other!r} as {headers[other].get_dtype()}; unpack it")
        return {
            name: StoredTensor(tuple(each.get_shape()), _DTYPES[each.get_dtype()], file)
            for name, each in headers.items()
        }


def _pickled(file: Path) -> dict[str, StoredTensor]:
    held = read_pickle(file)
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in held.items()
    ):
        raise CheckpointError(f"weights file {file} is not a dict of tensors; save model.state_dict()")
    return {name: StoredTensor(tuple(tensor.shape), tensor.dtype, file, tensor) for name, tensor in held.items()}


# ---- companions -----------------------------------------------------------------------------------------------------


def generation_config(folder: Path | None) -> list[Path]:
    """The generation config in ``folder``, if it has one."""
    return [] if folder is None or not (file := folder / GENERATION_CONFIG_FILE).exists() else [file]


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The tokenizer's files in ``folder``, a folder of chat templates among them; none if it has no tokenizer."""
    names = [] if folder is None else sorted(folder.iterdir())
    return [each for each in names if any(fnmatchcase(each.name, glob) for glob in TOKENIZER_FILES)]


def companion_files(companions: Path | None, tokenizer: Path | None = None) -> list[Path]:
    """What to copy beside converted weights.

    Args:
        companions: ``Source.companions``.
        tokenizer: A tokenizer's folder, instead of that among the companions.
    """
    return generation_config(companions) + tokenizer_files(companions if tokenizer is None else tokenizer)


def copy_companions(files: Iterable[Path], folder: Path) -> None:
    """Copy them into ``folder``, which is made if there are any."""
    for path in files:
        folder.mkdir(exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
