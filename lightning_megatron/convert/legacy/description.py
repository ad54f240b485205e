"""What does a legacy checkpoint say of itself, and which tensors has it? For whoever wants to look, not to convert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_megatron.convert.legacy.arguments import own_config
from lightning_megatron.convert.legacy.arguments_out import HUGGING_FACE_CONFIG
from lightning_megatron.convert.legacy.layout import RankFiles, find_files
from lightning_megatron.convert.legacy.merged import whole_shape
from lightning_megatron.convert.legacy.rank_state import load_rank
from lightning_megatron.convert.legacy.stacking import States, architecture_of, stack
from lightning_megatron.convert.pickled.pickle_machine import Inert
from lightning_megatron.errors import CheckpointError, ConfigError

_LONGEST = 200
"""Characters of an argument's text, and items of a list."""


class StoredEntry(NamedTuple):
    """One tensor."""

    name: str
    """As in the file, its layer counted over all stages."""
    shape: tuple[int, ...]
    """Of all tensor-parallel ranks together, with padding."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Description:
    """A legacy checkpoint, as ``inspect`` shows it."""

    folder: Path
    """Of the iteration, or the file."""
    facts: Mapping[str, Any]
    """Plain data by name."""
    entries: tuple[StoredEntry, ...]


def describe_legacy(path: Path) -> Description:
    """Describe the legacy checkpoint at ``path``, also one of a model that cannot be converted.

    Raises:
        CheckpointError: If it is damaged, incomplete or unsafe.
    """
    files = find_files(path)
    states = {rank: load_rank(part) for rank, part in sorted(files.parts.items())}
    first = states[0, 0]
    try:
        entries = _whole_tensors(files, states)
    except CheckpointError as error:
        entries = tuple(_of_each_rank(files, states))
        note: str | None = f"shown rank by rank: {error}"
    else:
        note = None
    facts = {
        "checkpoint_version": first.version,
        "layout": {
            "tp": files.tp,
            "pp": files.pp,
            **({"vpp": len(first.chunks)} if len(first.chunks) > 1 else {}),
        },
        "iteration": first.iteration or _shown(first.others.get("iteration")),
        "consumed_samples": _shown(first.arguments.get("consumed_train_samples")) or None,
        "args": shown_arguments(first.arguments),
        "config": _config(first.arguments),
        "others": [name for name in first.others if name not in ("iteration", "checkpoint_version")],
        "note": note,
    }
    return Description(folder=files.path, facts=facts, entries=entries)


def shown_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments as plain data, without the config of ours among them."""
    return {name: _shown(value) for name, value in sorted(arguments.items()) if name != HUGGING_FACE_CONFIG}


def _config(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        config = own_config(arguments)
    except ConfigError:  # of a family that is not known here; convert says so
        return {}
    return {} if config is None else dict(config.to_dict())


def _whole_tensors(files: RankFiles, states: States) -> tuple[StoredEntry, ...]:
    stacked = stack(files, states, architecture_of(states))
    return tuple(
        StoredEntry(stacked.names[key], whole_shape(key, shards), shards[0].dtype)
        for key, shards in stacked.tensors.items()
    )


def _of_each_rank(files: RankFiles, states: States) -> Iterator[StoredEntry]:
    """Shards as they are."""
    for rank, state in states.items():
        for number, chunk in enumerate(state.chunks):
            model = "model" if len(state.chunks) == 1 else f"model{number}"
            for name, shard in chunk.items():
                yield StoredEntry(f"{files.rank_name(*rank)}.{model}.{name}", shard.shape, shard.dtype)


def _shown(value: Any) -> Any:
    """Numbers, texts and lists of them as they are, other things as a text; a file can hold anything."""
    if isinstance(value, str):
        return value[:_LONGEST]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        plain = (bool, int, float, type(None))
        return [
            each if isinstance(each, plain) else str(each)[:_LONGEST] if isinstance(each, str) else type(each).__name__
            for each in value[:_LONGEST]
        ]
    if isinstance(value, Inert):
        numbers = ", ".join(repr(each) for each in value.arguments if isinstance(each, (int, str)))
        return f"{value.name.rpartition('.')[2]}({numbers[:_LONGEST]})"
    if isinstance(value, (torch.dtype, Path)):
        return str(value).removeprefix("torch.")
    return type(value).__name__
