"""Which tensor of the whole model is each tensor of a rank's file? Layers are counted over all stages and chunks.

Chunk v of stage p comes after chunk v of stage p - 1, and after chunk v - 1 of the last stage. How many layers each has
is what its file says, so that they may differ. The shards of all tensor-parallel ranks are put beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_megatron.convert.legacy.layout import RankFiles
from lightning_megatron.convert.legacy.names import HEAD_COPY, key_of
from lightning_megatron.convert.legacy.rank_state import RankState
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import Architecture

EMBEDDING = Key("embedding.word_embeddings.weight", None)
_MOST_NAMED = 5

Shards = tuple[TensorHandle, ...]
"""Of one tensor, those of all tensor-parallel ranks."""
States = Mapping[tuple[int, int], RankState]
"""Of each tensor- and pipeline-parallel rank."""


@dataclass(kw_only=True)
class Stacked:
    """All tensors of a model, found in the files of its ranks."""

    tensors: dict[Key, Shards] = field(default_factory=dict)
    """The first copy of each."""
    names: dict[Key, str] = field(default_factory=dict)
    """Of each in the file, its layer counted over all stages."""
    copies: list[tuple[Key, Shards]] = field(default_factory=list)
    """What later stages have again."""
    num_layers: dict[str, int] = field(default_factory=dict)
    """Of each stack, ``encoder`` and ``decoder``."""


def architecture_of(states: States) -> Architecture:
    """Decoder, encoder or both, by the names of tensors; GPT and BERT differ only around their layers."""
    names = {name for (tensor, _), state in states.items() if tensor == 0 for chunk in state.chunks for name in chunk}
    if any(".inter_attention." in name or ".cross_attention." in name for name in names):
        return "t5"
    of_bert = ("lm_head.", "binary_head.", "pooler.", "language_model.pooler.", "classification_head.", "encoder.")
    if any(name.startswith(of_bert) or ".tokentype_embeddings." in name for name in names):
        return "bert"
    return "gpt"


def stack(files: RankFiles, states: States, architecture: Architecture) -> Stacked:
    """Find all tensors of the model.

    Raises:
        CheckpointError: If ranks do not fit together, a layer is missing, or a tensor is unknown.
    """
    stacked = Stacked()
    num_chunks = len(states[0, 0].chunks)
    for rank, state in states.items():
        if len(state.chunks) != num_chunks or state.version != states[0, 0].version:
            raise CheckpointError(
                f"{files.path} is a mixture: {files.rank_name(*rank)} has {len(state.chunks)} model chunks of version "
                f"{state.version:g}, {files.rank_name(0, 0)} {num_chunks} of {states[0, 0].version:g}; copy it again"
            )
    for chunk in range(num_chunks):
        for stage in range(files.pp):
            named = _beside_each_other(files, states, chunk, stage)
            _add(stacked, files, named, architecture)
    return stacked


def _beside_each_other(files: RankFiles, states: States, chunk: int, stage: int) -> dict[str, Shards]:
    first = states[0, stage].chunks[chunk]
    for tensor in range(1, files.tp):
        other = states[tensor, stage].chunks[chunk]
        difference = sorted(set(first) ^ set(other)) or sorted(
            name for name in first if (first[name].shape, first[name].dtype) != (other[name].shape, other[name].dtype)
        )
        if difference:
            raise CheckpointError(
                f"{files.path} is a mixture: {files.rank_name(0, stage)} and {files.rank_name(tensor, stage)} differ "
                f"in {', '.join(difference[:_MOST_NAMED])}; copy it again"
            )
    return {name: tuple(states[tensor, stage].chunks[chunk][name] for tensor in range(files.tp)) for name in first}


def _add(stacked: Stacked, files: RankFiles, named: Mapping[str, Shards], architecture: Architecture) -> None:
    """The tensors of one chunk; its layers come after those that ``stacked`` has."""
    local = {name: EMBEDDING if name == HEAD_COPY else key_of(name, architecture) for name in named}
    unknown = [name for name, key in local.items() if key is None]
    if unknown:
        raise CheckpointError(
            f"{files.path} has tensors that no known model has: {', '.join(unknown[:_MOST_NAMED])}"
            f"{', ...' if len(unknown) > _MOST_NAMED else ''}; it is of a variant of Megatron-LM that is not read"
        )
    before = dict(stacked.num_layers)
    layers: dict[str, set[int]] = {}
    for name, shards in named.items():
        key = local[name]
        assert key is not None
        name_of_all = name
        if key.layer is not None:
            stack_name = key.name.split(".")[0]
            layers.setdefault(stack_name, set()).add(key.layer)
            layer = key.layer + before.get(stack_name, 0)
            name_of_all = name.replace(f".layers.{key.layer}.", f".layers.{layer}.", 1)
            key = key._replace(layer=layer)
        if key in stacked.tensors or name == HEAD_COPY:
            stacked.copies.append((key, shards))
        else:
            stacked.tensors[key], stacked.names[key] = shards, name_of_all
    for stack_name, numbers in layers.items():
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{files.path} has the layers {sorted(numbers)} in one model chunk, which must be counted from 0"
            )
        stacked.num_layers[stack_name] = before.get(stack_name, 0) + len(numbers)
