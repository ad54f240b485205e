"""The model directory to verify, and the round trip of its tensors through a live model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.convert.dequantized import open_dequantized
from lightning_megatron.convert.expert_files import with_separate_experts
from lightning_megatron.convert.formats import find_source, join_names, open_source
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.source import NO_WEIGHTS, ModelSource
from lightning_megatron.convert.weight_files import WeightFiles
from lightning_megatron.convert.weight_gatherer import WeightGatherer
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.storage.hub import local_folder
from lightning_megatron.verify.job import Result

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HELD_BY_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def open_directory(path: Path) -> ModelSource:
    """Open a Hugging Face model directory by its headers, and describe its model.

    Args:
        path: The directory, or the name of a model on the hub.

    Raises:
        ConfigError: If there is none, no known family computes it, or it lacks weights or a config.
    """
    path = local_folder(path, "model")
    expected = f"MODEL_DIR {path}: expected a Hugging Face model directory"
    if not path.exists():
        raise ConfigError(f"{expected}, got no such path; correct it")
    if not path.is_dir():
        raise ConfigError(f"{expected}, got a file; give its directory")
    if find_source(path) is None:
        names = join_names(sorted(entry.name for entry in path.iterdir()))
        raise ConfigError(f"{expected} with weights, got {names or 'an empty directory'}; give one")
    source = open_source(path)
    if source.kind != HuggingFaceSource.kind:
        raise ConfigError(
            f"{expected}, got a {source.kind}; write one with lightning-megatron convert --load-path {path} --save-path"
            " DIR --to hf"
        )
    return source


def hugging_face_class(model: ModelConfig) -> Any:
    """The class of transformers with the model's head.

    Raises:
        ConfigError: If there is none.
    """
    family = family_of(model.family)
    return family.load_class(family.class_of(model.task))


def round_trip(
    chunks: Iterable[Any],
    model: ModelConfig,
    directory: Path,
    result: Result,
    report: Callable[[int, int], None],
) -> None:
    """Compare the tensors of an export with those of the directory, bit for bit. Collective over the world.

    An export gathers one tensor at a time; it is compared instead of written.

    Args:
        chunks: This rank's model chunks.
        model: Config that they were built from.
        directory: The model directory.
        result: Gets the outcome, on rank 0.
        report: Called on rank 0 with the number of tensors done, and of all.
    """
    gatherer = WeightGatherer(chunks, model)
    total = len(gatherer.contents())
    comparison = None
    if dist.get_rank() == 0:
        files = with_separate_experts(open_dequantized(directory), model)
        comparison = _Comparison(files, model, result)
    for done, (name, tensor) in enumerate(gatherer.tensors(), 1):
        if comparison is not None and tensor is not None:
            comparison.compare(name, tensor)
            report(done, total)
    if comparison is not None:
        comparison.end()


class _Comparison:
    """Compares exported tensors with stored ones by transformers' names."""

    def __init__(self, files: WeightFiles, model: ModelConfig, result: Result) -> None:
        self._files = files
        self._result = result
        self._base = family_of(model.family).names.base
        self._class = hugging_face_class(model)
        self._stored_of: dict[str, str] = {}

    def compare(self, name: str, tensor: torch.Tensor) -> None:
        """Compare one exported tensor with the stored one of its name, with or without the prefix of the base model."""
        self._result.num_tensors += 1
        stored_name = self._find(name)
        if stored_name is None:
            self._result.wrong_tensors.append(f"`{name}` is exported, and not in the directory")
            return
        self._stored_of[name] = stored_name
        problem = difference_of_bits(tensor, self._read(stored_name))
        if problem:
            self._result.wrong_tensors.append(f"`{name}` {problem}")

    def end(self) -> None:
        """Account for stored tensors that no exported one has the name of: copies of tied ones, or of other heads."""
        used = set(self._stored_of.values())
        ignored = self._class._keys_to_ignore_on_load_unexpected or ()
        for stored_name in self._files.tensors:
            if stored_name in used or NO_WEIGHTS.search(stored_name):
                continue
            if any(re.search(pattern, stored_name) for pattern in ignored):
                continue
            source = self._tied_to(stored_name)
            if source is None:
                self._result.left_out.append(stored_name)
                continue
            problem = difference_of_bits(self._read(source), self._read(stored_name))
            if problem:
                text = f"`{stored_name}`, tied to `{source}`, {problem}"
                self._result.wrong_tensors.append(text)

    def _find(self, name: str) -> str | None:
        candidates = [name, name.removeprefix(self._base)]
        tied: Mapping[str, str] = self._class._tied_weights_keys or {}
        candidates += [copy for copy, source in tied.items() if source == name]
        return next((each for each in candidates if each in self._files.tensors), None)

    def _tied_to(self, stored_name: str) -> str | None:
        """Stored name of the exported tensor that a stored one is a copy of."""
        tied: Mapping[str, str] = self._class._tied_weights_keys or {}
        source = tied.get(stored_name, tied.get(self._base + stored_name, ""))
        return self._stored_of.get(source)

    def _read(self, name: str) -> torch.Tensor:
        return self._files.read(name, (slice(None),))


def difference_of_bits(tensor: torch.Tensor, stored: torch.Tensor) -> str:
    """How an exported tensor differs from the stored one, bit for bit in the dtype with fewer bits; "" if it does not.

    Args:
        tensor: Exported, in the dtype that the model computes in.
        stored: Of the directory.
    """
    if tensor.shape != stored.shape:
        return f"has the shape {list(tensor.shape)} instead of {list(stored.shape)}"
    if tensor.dtype == torch.float32 and stored.dtype in _HELD_BY_FP32:
        exported = tensor.to(stored.dtype)
        is_held = (exported.to(tensor.dtype) == tensor) | tensor.isnan()
        if not is_held.all():
            return f"has values that {_dtype_name(stored)} does not hold"
    else:
        exported = tensor
        stored = stored.to(tensor.dtype)
    bits = _BITS[stored.dtype.itemsize]
    different = exported.contiguous().view(bits) != stored.contiguous().view(bits)
    count = int(different.sum())
    if not count:
        return ""
    first = [int(index) for index in different.nonzero()[0]]
    values = f"{exported[tuple(first)].item():.6g} instead of {stored[tuple(first)].item():.6g}"
    return f"differs in {count:,} of {stored.numel():,} elements, first at {first}: {values}"


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
