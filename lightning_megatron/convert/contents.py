"""What a path holds: which iteration of several, which kind of checkpoint, and its tensors by header.

No weight is read, no model is built and no code of a checkpoint is run. Known are directories of ``MegatronStrategy``
(``*.ckpt``), distributed checkpoints of Megatron-Core (``torch_dist``) and legacy ones of Megatron-LM, both also below
``iter_0000N``, and Hugging Face model directories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_megatron.checkpoint.files import (
    META,
    check_complete,
    check_only_data,
    is_distributed,
    load_plain,
)
from lightning_megatron.convert.distributed import OF_MEGATRON_CORE, OF_STRATEGY, read_common, stored_tensors
from lightning_megatron.convert.hugging_face import (
    CONFIG_FILE,
    directory_of,
    has_weights,
    open_weights,
    read_safetensors,
)
from lightning_megatron.convert.megatron_arguments import HUGGING_FACE_CONFIG, arguments_of, own_config
from lightning_megatron.convert.megatron_lm import OF_MEGATRON_LM, TRACKER_FILE, is_legacy, read_ranks, stack, stored_in
from lightning_megatron.convert.peft import CONFIG, WEIGHTS
from lightning_megatron.convert.registry import read_json
from lightning_megatron.convert.shards import Stored
from lightning_megatron.engine.pickles import StandIn
from lightning_megatron.errors import CheckpointError, ConfigError

_LONGEST = 200
"""Characters of an argument's text, and items of a list."""


# ---- iterations ------------------------------------------------------------------------------------------------------

_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_LONGEST_TEXT = 40
_MOST_NAMED = 5


def iteration_folder(path: Path, iteration: int | None = None) -> Path:
    """``path``, or the folder in it of ``iteration``, or if that is None of the one that the tracker file names.

    Raises:
        CheckpointError: If there is no such iteration, or several and nothing says which.
        ConfigError: If ``iteration`` is given, and ``path`` does not hold several.
    """
    names = [each.name for each in path.iterdir() if each.is_dir()] if path.is_dir() else []
    found = sorted(name for name in names if name == _RELEASE or _ITERATION.fullmatch(name))
    tracker = path / TRACKER_FILE
    if not found and not tracker.is_file():
        if iteration is not None:
            raise ConfigError(
                f"iteration={iteration} would do nothing: {path} has no folders iter_{iteration:07}; leave it out"
            )
        return path
    if iteration is not None:
        wanted, origin = f"iter_{iteration:07}", f"iteration={iteration} is not there:"
    elif tracker.is_file():
        text = tracker.read_text(errors="replace").strip()[:_LONGEST_TEXT]
        wanted, origin = text, f"{tracker} names iteration {text!r}, and"
        if text.isascii() and text.isdecimal():
            wanted = f"iter_{text.lstrip('0').zfill(7)}"
    elif len(found) == 1:
        return path / found[0]
    else:
        wanted, origin = "", f"{path} has several iterations and no {TRACKER_FILE}; give the folder of one:"
    if wanted not in found:
        raise CheckpointError(f"{origin} there is no folder {wanted} in {path}; there are: {named(found) or 'none'}")
    return path / wanted


def find_checkpoint(
    path: Path, iteration: int | None = None
) -> tuple[Path, Literal["distributed", "hugging_face", "adapter", "legacy"] | None]:
    """The folder or file of the checkpoint at ``path``, and its kind; None if it is of no known one.

    Raises:
        CheckpointError: As ``iteration_folder``.
        ConfigError: Likewise.
    """
    path = iteration_folder(directory_of(path) or path, iteration)
    if path.is_dir() and ((path / META).is_file() or is_distributed(path)):
        return path, "distributed"
    if path.is_dir() and has_weights(path):
        return path, "hugging_face"
    if (path / CONFIG).is_file() and (path / WEIGHTS).is_file():
        return path, "adapter"
    return path, "legacy" if is_legacy(path) else None


def named(names: list[str]) -> str:
    """The first of the names of files, for messages."""
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


# ---- contents --------------------------------------------------------------------------------------------------------


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
    path, kind = find_checkpoint(path)
    if kind == "distributed":
        return _of_strategy(path) if (path / META).is_file() else _of_megatron_core(path)
    if kind == "hugging_face":
        return _hugging_face(path)
    if kind == "adapter":
        stored = {name: Stored(*each[:2]) for name, each in read_safetensors(path / WEIGHTS).items()}
        return _contents(path, "PEFT adapter", {"adapter": read_json(path / CONFIG)}, stored)
    return _of_megatron_lm(path) if kind == "legacy" else None


def _of_strategy(path: Path) -> CheckpointContents:
    check_complete(path)
    check_only_data(path)
    meta = load_plain(path / META)
    try:
        lightning = meta["lightning"]
        facts = {
            "format_version": meta["format_version"],
            "model": {name: value for name, value in meta["model_description"].items() if value is not None},
            "base": meta.get("base"),
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


def _of_megatron_core(path: Path) -> CheckpointContents:
    common = read_common(path)
    plain = ("checkpoint_version", "iteration")
    facts: dict[str, Any] = {name: common[name] for name in plain if isinstance(common.get(name), (int, float))}
    facts["args"] = _shown_arguments(arguments_of(common))
    return _contents(path, OF_MEGATRON_CORE, facts, _distributed_tensors(path))


def _of_megatron_lm(path: Path) -> CheckpointContents:
    """Also of a model that cannot be converted."""
    ranks = read_ranks(path)
    first, stacked = ranks.states[0, 0], stack(ranks)
    try:
        config = own_config(first.arguments)
    except ConfigError:  # of a family that is not known here; convert says so
        config = None
    num_chunks = len(first.chunks)
    facts = {
        "checkpoint_version": first.version,
        "layout": {"tp": ranks.tp, "pp": ranks.pp, **({"vpp": num_chunks} if num_chunks > 1 else {})},
        "iteration": first.iteration or _shown(first.others.get("iteration")),
        "consumed_samples": _shown(first.arguments.get("consumed_train_samples")) or None,
        "args": _shown_arguments(first.arguments),
        "config": {} if config is None else config.to_dict(),
        "others": [name for name in first.others if name not in ("iteration", "checkpoint_version")],
    }
    tensors = {stacked[key][0][0]: each for key, each in stored_in(stacked).items()}
    return _contents(ranks.path, OF_MEGATRON_LM, facts, tensors)


def _shown_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments as plain data, without the config of ours among them."""
    return {name: _shown(value) for name, value in sorted(arguments.items()) if name != HUGGING_FACE_CONFIG}


def _shown(value: Any) -> Any:
    """Numbers, texts and lists of them as they are, other things as a text; a file can hold anything."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_shown(each) for each in value[:_LONGEST]]
    plain = isinstance(value, (str, torch.dtype, Path, StandIn))
    return str(value)[:_LONGEST].removeprefix("torch.") if plain else type(value).__name__


def _distributed_tensors(path: Path) -> dict[str, Stored]:
    return {name: Stored(tuple(each.size), each.properties.dtype) for name, each in stored_tensors(path).items()}


def _hugging_face(path: Path) -> CheckpointContents:
    config = read_json(path) if (path / CONFIG_FILE).is_file() else {}
    tensors = {name: Stored(each.shape, each.dtype) for name, each in open_weights(path).tensors.items()}
    return _contents(path, "Hugging Face model directory", {"config": config}, tensors)


def _contents(path: Path, kind: str, facts: Mapping[str, Any], tensors: Mapping[str, Stored]) -> CheckpointContents:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return CheckpointContents(
        path=path,
        kind=kind,
        facts={name: value for name, value in facts.items() if value not in (None, {}, [])},
        tensors=tuple(
            TensorEntry(
                name=name,
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                num_bytes=math.prod(shape) * dtype.itemsize,
            )
            for name, (shape, dtype) in sorted(tensors.items(), key=lambda each: natural_key(each[0]))
        ),
        num_files=len(files),
        stored_bytes=sum(each.stat().st_size for each in files),
    )


def natural_key(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sorts ``layers.10`` behind ``layers.9``."""
    return tuple((part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split("."))
