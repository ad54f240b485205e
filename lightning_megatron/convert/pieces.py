"""Which rows and columns of which Hugging Face tensors is one rank's shard?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_megatron.convert.rules import LAYER, Rule
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

_NUMBERED_LAYER = re.compile(r"^(.*?\blayers)\.(\d+)\.")
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a shard stands in one whole tensor of the model; small, and sent between ranks."""

    rule: int
    """Number of the tensor's rule."""
    layer: int | None
    """Number of the layer, over all stages; None for tensors of no layer."""
    shape: tuple[int, ...]
    """Of the whole tensor, without the rows that pad the vocabulary."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Of the shard, padding included."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A live shard of this rank."""

    place: Place
    data: torch.Tensor
    """The parameter's own memory."""
    is_first_copy: bool
    """Whether no other rank (or chunk) comes before this one with the same part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Rows of a shard that come from one Hugging Face tensor."""

    tensor: int
    """Which of the rule's tensors."""
    ours: torch.Tensor
    """[n], int64: row of the shard."""
    theirs: torch.Tensor
    """[n], int64: its row in the Hugging Face tensor, or its column if that is transposed."""


def shards_of(chunks: Iterable[Any], rules: Sequence[Rule], model: ModelConfig) -> list[Shard]:
    """This rank's shards, in the order of its chunks; a layer's number is that over all stages.

    Args:
        chunks: This rank's model chunks, wrapped or not.
        rules: Those of the model's family.
        model: The description that the chunks were built from.
    """
    # Not above: files are converted without the engine, whose import takes seconds.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from lightning_megatron.engine.wrap import unwrap

    number = {rule.megatron: i for i, rule in enumerate(rules)}
    shards = []
    for chunk in chunks:
        state = unwrap(chunk).sharded_state_dict()
        apply_factories(state)
        for tensor in nested_values(state):
            if isinstance(tensor, ShardedTensor):
                shards.append(_shard(tensor, number, model))
    return shards


def _shard(tensor: ShardedTensor, number_of_rule: dict[str, int], model: ModelConfig) -> Shard:
    axes, key, layer = tensor.prepend_axis_num, tensor.key, None
    if axes:
        layer = int(tensor.global_offset[0])
    elif numbered := _NUMBERED_LAYER.match(key):
        layer = int(numbered[2])
        key = f"{numbered[1]}.{key[numbered.end() :]}"
    if key not in number_of_rule:
        raise KeyError(f"the rules of {model.family} do not name {key}; add it to convert/families/")
    shape = tuple(tensor.global_shape)[axes:]
    if key.endswith(_OF_VOCABULARY):
        shape = (model.vocab_size, *shape[1:])
    place = Place(
        rule=number_of_rule[key],
        layer=layer,
        shape=shape,
        offset=tuple(tensor.global_offset)[axes:],
        size=tuple(tensor.local_shape),
        dtype=tensor.dtype,
    )
    replica = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id,)
    return Shard(place=place, data=tensor.data.detach(), is_first_copy=not any(replica))


def names_of(rule: Rule, layer: int | None) -> tuple[str, ...]:
    """The rule's Hugging Face names for one layer."""
    return tuple(name.replace(LAYER, str(layer)) for name in rule.hugging_face)


def shapes_of(rule: Rule, place: Place) -> tuple[tuple[int, ...], ...]:
    """Shapes of the rule's Hugging Face tensors."""
    rows = _rows(rule, place)
    shapes = [(length, *place.shape[1:]) for length in rows]
    return tuple(shape[::-1] if rule.transposed else shape for shape in shapes)


def _rows(rule: Rule, place: Place) -> tuple[int, ...]:
    rows = rule.rows or (place.shape[0],)
    assert len(rows) == len(rule.hugging_face), rule.megatron
    assert sum(rows) == place.shape[0], f"{rule.megatron} has {place.shape[0]} rows, its rule {sum(rows)}"
    assert rule.order is None or len(rule.order) == place.shape[0], rule.megatron
    return rows


def pieces(rule: Rule, place: Place) -> Iterator[Piece]:
    """Where the rows of a shard come from; rows that pad the vocabulary come from nowhere."""
    start, stop = place.offset[0], min(place.offset[0] + place.size[0], place.shape[0])
    if stop <= start:
        return
    source = torch.arange(start, stop) if rule.order is None else rule.order[start:stop]
    first = 0
    for i, length in enumerate(_rows(rule, place)):
        ours = ((source >= first) & (source < first + length)).nonzero().flatten()
        if len(ours):
            yield Piece(tensor=i, ours=ours, theirs=source[ours] - first)
        first += length


def padding(place: Place) -> slice:
    """The rows of the shard that pad the vocabulary."""
    return slice(max(0, place.shape[0] - place.offset[0]), None)


def columns(place: Place) -> slice:
    """The columns of the whole tensor that the shard has."""
    if len(place.shape) == 1:
        return slice(0, 0)
    return slice(place.offset[1], place.offset[1] + place.size[1])


def index(rows: torch.Tensor) -> slice | torch.Tensor:
    """``rows`` as a slice if they follow each other, so that nothing is copied to take them."""
    first, last = int(rows[0]), int(rows[-1])
    is_range = last - first == len(rows) - 1 and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if is_range else rows
