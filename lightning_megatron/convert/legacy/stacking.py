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
_AFTER_HEAD_COPY = ("lm_head.", "binary_head.")
"""Modules that Megatron-LM makes after the copy of the embedding, though its files have them before."""
_MOST_NAMED = 5

Shards = tuple[TensorHandle, ...]
"""Of one tensor, those of all tensor-parallel ranks."""
States = Mapping[tuple[int, int], RankState]
"""Of each tensor- and pipeline-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of one stage."""

    key: Key
    """What it is; a copy has that of the original."""
    name: str
    """In the file, its layer counted over all stages."""
    is_copy: bool
    """Whether an earlier stage has it, too."""
    shards: Shards


@dataclass(kw_only=True)
class Stacked:
    """All tensors of a model, found in the files of its ranks."""

    tensors: dict[Key, Shards] = field(default_factory=dict)
    """The first copy of each."""
    stages: list[list[Parameter]] = field(default_factory=list)
    """Of each pipeline stage, its parameters as its optimizer counts them."""
    num_layers: dict[str, int] = field(default_factory=dict)
    """Of each stack, ``encoder`` and ``decoder``."""

    @property
    def copies(self) -> list[Parameter]:
        """What later stages have again."""
        return [parameter for stage in self.stages for parameter in stage if parameter.is_copy]


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
    stacked = Stacked(stages=[[] for _ in range(files.pp)])
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
            stacked.stages[stage] += _parameters(files, named, stacked, architecture)
    for parameters in stacked.stages:
        _move_head_copy(parameters)
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


def _parameters(
    files: RankFiles, named: Mapping[str, Shards], stacked: Stacked, architecture: Architecture
) -> list[Parameter]:
    """Those of one chunk; its layers come after those that ``stacked`` has."""
    local = {name: EMBEDDING if name == HEAD_COPY else key_of(name, architecture) for name in named}
    unknown = [name for name, key in local.items() if key is None]
    if unknown:
        raise CheckpointError(
            f"{files.path} has tensors that no known model has: {', '.join(unknown[:_MOST_NAMED])}"
            f"{', ...' if len(unknown) > _MOST_NAMED else ''}; it is of a variant of Megatron-LM that is not read"
        )
    before = dict(stacked.num_layers)
    layers: dict[str, set[int]] = {}
    parameters = []
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
        is_copy = key in stacked.tensors or name == HEAD_COPY
        parameters.append(Parameter(key=key, name=name_of_all, is_copy=is_copy, shards=shards))
        if not is_copy:
            stacked.tensors[key] = shards
    for stack_name, numbers in layers.items():
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{files.path} has the layers {sorted(numbers)} in one model chunk, which must be counted from 0"
            )
        stacked.num_layers[stack_name] = before.get(stack_name, 0) + len(numbers)
    return parameters


def _move_head_copy(parameters: list[Parameter]) -> None:
    """Into the order in which Megatron-LM's modules are made, and its optimizers count."""
    copy = next((each for each in parameters if each.is_copy and each.key == EMBEDDING), None)
    if copy is None or parameters[-1] is not copy:
        return
    place = next((i for i, each in enumerate(parameters) if each.key.name.startswith(_AFTER_HEAD_COPY)), None)
    bias = next((i for i, each in enumerate(parameters) if each.key.name == "output_layer.bias"), None)
    places = [each for each in (place, bias) if each is not None]
    if places:
        parameters.remove(copy)
        parameters.insert(min(places), copy)
