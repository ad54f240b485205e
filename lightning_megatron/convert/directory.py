"""How is a Hugging Face model directory written, so that nothing half-written carries a final name?

Files are written into a folder of another name and moved at the end. What ``from_pretrained`` looks for first (the
single file, or the index) leaves first and arrives last: a directory is the old model, the new one, or none.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.companions import copy_companions
from lightning_megatron.convert.filling import check_filled
from lightning_megatron.convert.hugging_face_files import INDEX_FILE, SAFETENSORS_NAMES, WEIGHTS_FILE
from lightning_megatron.convert.registry import family_of
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig

Contents = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor."""

_ENTRY_FILES = (WEIGHTS_FILE, INDEX_FILE)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: str | int) -> int:
    """Bytes of ``200MB``, ``5GB``, ``1.5GiB`` or a number.

    Raises:
        ConfigError: If it is not a positive size.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or not parts or parts[2].upper() not in _UNITS or float(parts[1]) <= 0:
        raise ConfigError(f"max_shard_size={size!r} is not a size; use e.g. '200MB', '5GB', or a number of bytes")
    return max(1, int(float(parts[1]) * _UNITS[parts[2].upper()]))


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One safetensors file that is to be written."""

    name: str
    contents: Contents

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors, in their order."""
        return tuple(self.contents)

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(_num_bytes(*entry) for entry in self.contents.values())

    @property
    def header(self) -> bytes:
        """Everything before the tensors' bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, (shape, dtype) in self.contents.items():
            stop = start + _num_bytes(shape, dtype)
            entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def files_of(contents: Contents, largest: int) -> list[WeightFile]:
    """Cut the tensors, in their order, into files of at most ``largest`` bytes or one tensor."""
    parts: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
    filled = 0
    for name, entry in contents.items():
        size = _num_bytes(*entry)
        if not parts or filled + size > largest:
            parts.append({})
            filled = 0
        parts[-1][name] = entry
        filled += size
    if len(parts) == 1:
        return [WeightFile(name=WEIGHTS_FILE, contents=parts[0])]
    count = len(parts)
    return [WeightFile(name=f"model-{i:05}-of-{count:05}.safetensors", contents=p) for i, p in enumerate(parts, 1)]


def saved_config(hf_config: Any, model: ModelConfig, contents: Contents) -> Any:
    """``hf_config`` of a model with these tensors: its class, and the dtype of most of the numbers."""
    sizes: dict[torch.dtype, int] = {}
    for shape, dtype in contents.values():
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
    config = copy.deepcopy(hf_config)
    config.architectures = [family_of(model.family).architectures[model.task]]
    config.__dict__.pop("auto_map", None)  # it names files with code, which do not travel along
    config.dtype = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
    return config


class Directory:
    """Rank 0's writer of a model directory: ``begin``, ``write`` every tensor in order, ``finish``, ``discard``."""

    def __init__(self, path: Path, files: list[WeightFile]) -> None:
        self._path = path.absolute()
        self._files = files
        # Inside what exists: that is surely the same disk, and its parent need not be ours.
        beside = self._path.with_name(f".{self._path.name}.partial")
        self._staged = self._path / ".partial" if self._path.is_dir() else beside
        self._remaining = iter([(file, name) for file in files for name in file.names])
        self._open: RawIOBase | None = None

    def begin(self, config: Any, companions: Iterable[Path] = ()) -> None:
        """Write the small files: what cannot be written is better known before the weights are.

        Args:
            config: A Hugging Face config object.
            companions: Files to copy.
        """
        with _disk_errors(self._path):
            if self._path.exists() and not self._path.is_dir():
                raise CheckpointError(f"{self._path} is a file; give the name of a directory to save the model in")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged.mkdir()
            self._write_config(config)
            if len(self._files) > 1:
                self._write_json(INDEX_FILE, self._index())
            copy_companions(companions, self._staged)

    def _write_config(self, config: Any) -> None:
        try:
            config.save_pretrained(self._staged)
        except OSError:
            raise
        except Exception as error:  # transformers validates with errors of its own
            reason = " ".join(str(error).split())
            raise CheckpointError(f"transformers does not save this model's config: {reason}; correct it") from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor; at the end of a file it is forced to the disk."""
        self.write_rows(name, [tensor])

    def write_rows(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """``write`` for a tensor that comes in blocks of rows, one after the other."""
        file, expected = next(self._remaining)
        assert name == expected
        shape, dtype = file.contents[name]
        with _disk_errors(self._path):
            if name == file.names[0]:
                self._open = (self._staged / file.name).open("wb", buffering=0)
                _write_all(self._open, memoryview(file.header))
            assert self._open is not None
            rows = 0
            for block in blocks:
                assert (tuple(block.shape[1:]), block.dtype) == (shape[1:], dtype), name
                rows += len(block)
                _write_all(self._open, memoryview(block.contiguous().view(-1).view(torch.uint8).numpy().data))
            check_filled(name, rows * math.prod(shape[1:]), math.prod(shape))
            if name == file.names[-1]:
                self._close(self._open)
                self._open = None

    def finish(self) -> None:
        """Give everything its final name: short, and never with the old entry beside new files."""
        with _disk_errors(self._path):
            if not self._path.exists():
                self._staged.rename(self._path)
                return
            for name in _ENTRY_FILES:
                (self._path / name).unlink(missing_ok=True)
            new = sorted((file.name for file in self._staged.iterdir()), key=lambda name: name in _ENTRY_FILES)
            for name in new:
                (self._staged / name).replace(self._path / name)
            for file in self._path.iterdir():
                if _SHARD.fullmatch(file.name) and file.name not in new:
                    file.unlink()
            self._staged.rmdir()

    def discard(self) -> None:
        """Remove what has no final name yet."""
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.close()
        shutil.rmtree(self._staged, ignore_errors=True)

    def _index(self) -> dict[str, Any]:
        total = sum(file.num_bytes for file in self._files)
        parameters = sum(math.prod(shape) for file in self._files for shape, _ in file.contents.values())
        return {
            "metadata": {"total_size": total, "total_parameters": parameters},
            "weight_map": {name: file.name for file in self._files for name in file.names},
        }

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with (self._staged / name).open("wb") as file:
            file.write(json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")

    def _close(self, file: RawIOBase) -> None:
        os.fsync(file.fileno())
        file.close()


def _write_all(file: RawIOBase, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"model directory {directory} cannot be written ({error}); choose a directory that can be written, with "
            "enough space"
        ) from error
