"""What is in a checkpoint: which tensors, of which model, at which layout? Read without any weight, and without code.

Known are directories of ``MegatronStrategy`` (``*.ckpt``), distributed checkpoints of Megatron-Core (``torch_dist``)
and legacy ones of Megatron-LM, both also below ``iter_0000N``, and Hugging Face model directories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import (
    CHECKSUMS,
    COMMON,
    META,
    check_backends,
    check_complete,
    check_only_data,
    is_distributed,
    load_plain,
    read_table,
)
from lightning_megatron.convert.hugging_face_files import directory_of, has_weights, open_weights
from lightning_megatron.convert.iterations import iteration_folder
from lightning_megatron.convert.legacy.description import describe_legacy, shown_arguments
from lightning_megatron.convert.legacy.layout import is_legacy
from lightning_megatron.convert.legacy.rank_state import arguments_of
from lightning_megatron.convert.pickled.unpickler import load_pickled
from lightning_megatron.errors import CheckpointError

OF_STRATEGY = "checkpoint of MegatronStrategy"
OF_MEGATRON_CORE = "Megatron-Core distributed checkpoint (torch_dist)"
"""Kinds of distributed checkpoints, as messages name them."""
OF_MEGATRON_LM = "checkpoint of Megatron-LM"
"""The legacy kind: a pickle for each rank."""

_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor as it is stored, whole."""

    name: str
    """Its key."""
    shape: tuple[int, ...]
    """Of the whole tensor, whatever it was sharded into."""
    dtype: str
    """Torch's name, e.g. ``bfloat16``."""
    num_bytes: int
    """Size in memory."""

    @property
    def is_optimizer(self) -> bool:
        """Whether it is optimizer state, by its key."""
        return self.name.startswith("optimizer.") or ".optimizer." in self.name


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """What a checkpoint holds."""

    path: Path
    """Where it is."""
    kind: str
    """Who wrote it."""
    facts: Mapping[str, Any]
    """What else it says of itself: plain data by name."""
    tensors: tuple[TensorEntry, ...]
    """In the order of their names, numbers in names by value."""
    num_files: int
    """Files in it."""
    stored_bytes: int
    """Their sizes."""


def checkpoint_contents(path: Path) -> CheckpointContents | None:
    """Describe the checkpoint at ``path``; None if there is none of a known kind.

    Raises:
        CheckpointError: If it is unfinished, damaged, or could run code.
    """
    path = directory_of(path) or iteration_folder(path)
    if path.is_file():
        return _of_megatron_lm(path) if is_legacy(path) else None
    if (path / META).is_file():
        return _of_strategy(path)
    if is_distributed(path):
        return _of_megatron_core(path)
    if has_weights(path):
        return _hugging_face(path)
    return _of_megatron_lm(path) if is_legacy(path) else None


def _of_strategy(path: Path) -> CheckpointContents:
    check_complete(path)
    check_only_data(path)
    meta = load_plain(path / META)
    try:
        lightning = meta["lightning"]
        facts = {
            "format_version": meta["format_version"],
            "model": {name: value for name, value in meta["model_description"].items() if value is not None},
            "layout": {name: size for name, size in meta["layout"].items() if size is not None},
            "optimizer": meta["optimizer_format"],
            "global_step": lightning.get("global_step"),
            "epoch": lightning.get("epoch"),
            "data": dict(_positions(lightning)),
            "lightning": lightning.get("pytorch-lightning_version"),
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} was written by another strategy ({error!r} in {META})") from None
    return _contents(path, OF_STRATEGY, facts, _distributed_tensors(path))


def _positions(lightning: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Where each data module was: what it saved under its name."""
    for name, state in lightning.items():
        if isinstance(state, Mapping) and "train" in state and "train_order" in state:
            yield name, state["train"]


def check_of_megatron_core(path: Path) -> None:
    """Raise unless a distributed checkpoint without ``meta.pt`` is Megatron-Core's, not one of ours that is damaged.

    Raises:
        CheckpointError: If it has our checksums, or other backends than torch's.
    """
    if (path / CHECKSUMS).is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {META}: it is damaged; use another")
    check_backends(path)


def _of_megatron_core(path: Path) -> CheckpointContents:
    check_of_megatron_core(path)
    common = load_pickled(path / COMMON) if (path / COMMON).is_file() else {}
    facts: dict[str, Any] = {}
    if isinstance(common, Mapping):  # Megatron-LM's; other programs put there what they like
        plain = ("checkpoint_version", "iteration")
        facts = {name: common[name] for name in plain if isinstance(common.get(name), (int, float))}
        facts["args"] = shown_arguments(arguments_of(common))
    return _contents(path, OF_MEGATRON_CORE, facts, _distributed_tensors(path))


def _of_megatron_lm(path: Path) -> CheckpointContents:
    found = describe_legacy(path)
    tensors = [_entry(*each) for each in found.entries]
    return _contents(found.folder, OF_MEGATRON_LM, found.facts, tensors)


def _distributed_tensors(path: Path) -> list[TensorEntry]:
    entries = []
    try:
        for name, stored in read_table(path).state_dict_metadata.items():
            if hasattr(stored, "properties"):  # else bytes: what no layout shards
                shape, dtype = tuple(stored.size), stored.properties.dtype
                if not all(type(size) is int for size in shape):
                    raise ValueError(f"a shape {shape}")
                entries.append(_entry(str(name), shape, dtype))
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged table of contents ({error!r}); use another") from None
    return entries


def _hugging_face(path: Path) -> CheckpointContents:
    facts: dict[str, Any] = {}
    if (path / _CONFIG).is_file():
        try:
            config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / _CONFIG} cannot be read ({error}); fetch it again") from None
        facts = dict(config) if isinstance(config, dict) else {}
    weights = open_weights(path)
    tensors = [
        _entry(name, each.shape, each.dtype)
        if each.dtype
        else TensorEntry(name=name, shape=each.shape, dtype=each.dtype_name, num_bytes=each.num_bytes)
        for name, each in weights.tensors.items()
    ]
    return _contents(path, "Hugging Face model directory", {"config": facts} if facts else {}, tensors)


def _entry(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorEntry:
    num_bytes = math.prod(shape) * dtype.itemsize
    return TensorEntry(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), num_bytes=num_bytes)


def _contents(path: Path, kind: str, facts: Mapping[str, Any], tensors: list[TensorEntry]) -> CheckpointContents:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return CheckpointContents(
        path=path,
        kind=kind,
        facts={name: value for name, value in facts.items() if value not in (None, {}, [])},
        tensors=tuple(sorted(tensors, key=lambda each: natural_key(each.name))),
        num_files=len(files),
        stored_bytes=sum(each.stat().st_size for each in files),
    )


def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sorts ``layers.10`` behind ``layers.9``."""
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split("."))
