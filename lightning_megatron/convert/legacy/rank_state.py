"""What does the file of one rank of a legacy checkpoint hold? Arguments, flat weights of each chunk, and the rest."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lightning_megatron.convert.legacy.names import is_weight
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.pickled.unpickler import FilePart, load_pickled
from lightning_megatron.errors import CheckpointError

_CHUNK = re.compile(r"model(\d*)")
_DEEPEST = 16
"""Levels of dictionaries in each other."""
_MOST_TENSORS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's file."""

    arguments: Mapping[str, Any]
    """Megatron-LM's command line; empty in the oldest checkpoints."""
    version: float
    """Of the checkpoint; it says how the rows of queries, keys and values are ordered."""
    chunks: tuple[Mapping[str, TensorHandle], ...]
    """Weights of each model chunk, under flat names and in their order in the file."""
    others: Mapping[str, Any]
    """What else is there by name: ``iteration``, ``optimizer``, ``opt_param_scheduler``, ..."""

    @property
    def iteration(self) -> int:
        """Optimizer steps done when it was written; 0 if it does not say."""
        said = (self.others.get("iteration"), self.arguments.get("iteration"))
        return next((each for each in said if type(each) is int and each > 0), 0)


def load_rank(part: FilePart) -> RankState:
    """Read everything but the numbers.

    Raises:
        CheckpointError: If it is damaged or could run code, or is no checkpoint of Megatron-LM.
    """
    state = load_pickled(part)
    if not isinstance(state, Mapping):
        raise _foreign(part, f"it holds a {type(state).__name__}")
    models = {int(name[1] or 0): value for key, value in state.items() if (name := _CHUNK.fullmatch(str(key)))}
    if not models or sorted(models) != list(range(len(models))):
        raise _foreign(part, f"it has no 'model' (or not all of its chunks), but {_named(state)}")
    chunks = []
    for number in range(len(models)):
        if not isinstance(models[number], Mapping):
            raise _foreign(part, f"'model' is a {type(models[number]).__name__}")
        chunks.append(dict(_flat(part, models[number])))
        if not chunks[-1]:
            raise _foreign(part, "'model' has no tensors")
    version = state.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise _foreign(part, f"checkpoint_version is a {type(version).__name__}")
    return RankState(
        arguments=arguments_of(state),
        version=float(version),
        chunks=tuple(chunks),
        others={
            str(name): value for name, value in state.items() if name != "args" and not _CHUNK.fullmatch(str(name))
        },
    )


def arguments_of(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Megatron-LM's arguments by name, as a legacy file or ``common.pt`` keeps them; none if it has none."""
    stored = state.get("args")
    if isinstance(stored, (Namespace, SimpleNamespace)):
        return vars(stored)
    return stored if isinstance(stored, Mapping) else {}


def _flat(part: FilePart, nested: Mapping[Any, Any]) -> Iterator[tuple[str, TensorHandle]]:
    """Weights with the joined keys as names; dictionaries in each other, without end or shared a billion times, end."""
    remaining = _MOST_TENSORS

    def walk(level: Mapping[Any, Any], before: str, depth: int) -> Iterator[tuple[str, TensorHandle]]:
        nonlocal remaining
        if depth > _DEEPEST:
            raise _foreign(part, f"its dictionaries are more than {_DEEPEST} deep")
        for key, value in level.items():
            remaining -= 1
            if remaining < 0:
                raise _foreign(part, f"it has more than {_MOST_TENSORS:,} entries")
            if isinstance(value, Mapping):
                yield from walk(value, f"{before}{key}.", depth + 1)
            elif isinstance(value, TensorHandle) and is_weight(f"{before}{key}"):
                yield f"{before}{key}", value

    return walk(nested, "", 1)


def _foreign(part: FilePart, reason: str) -> CheckpointError:
    return CheckpointError(f"{part.path} is no checkpoint of Megatron-LM: {reason}; give another file")


def _named(state: Mapping[Any, Any]) -> str:
    return ", ".join(repr(str(name)[:40]) for name in list(state)[:5]) or "nothing"
