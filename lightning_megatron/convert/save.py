"""How does a model that is split over ranks become a Hugging Face directory? Tensor by tensor, through rank 0.

Each tensor is put together on rank 0 from the shards of the ranks of one copy of the model and is written at once: file
sizes are known beforehand, so that no file is ever held in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.convert.companions import generation_config
from lightning_megatron.convert.directory import Directory, files_of, saved_config, size_in_bytes
from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.load import progress_bar
from lightning_megatron.convert.pieces import Place, Shard, columns, index, names_of, pieces, shapes_of, shards_of
from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.shapes import tensor_shapes
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.groups import host_group
from lightning_megatron.models.config import ModelConfig

_TIMEOUT = timedelta(minutes=30)


def hugging_face_tensors(chunks: Iterable[Any], model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model under its Hugging Face names, one tensor after the other, on rank 0. Every rank must iterate.

    Whatever the parameters' ``data`` holds is taken, so that gradients can be had in Hugging Face's form, too.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.

    Yields:
        On rank 0 each name with the tensor on the CPU, in the parameters' dtype, without rows that pad the vocabulary;
        nothing on other ranks.
    """
    gathering = _Gathering(chunks, model)
    for name in gathering.names:
        tensor = gathering.next()
        if tensor is not None:
            yield name, tensor


def save_hugging_face(
    chunks: Iterable[Any],
    model: ModelConfig,
    hf_config: Any,
    directory: str | Path,
    max_shard_size: str | int = "5GB",
    source: Path | None = None,
) -> None:
    """Write a directory that ``AutoModelFor*.from_pretrained`` loads. Every rank must call; rank 0 writes.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.
        hf_config: The Hugging Face config object that it was described by.
        directory: Where to, made if it does not exist; files of other names in it stay.
        max_shard_size: Largest weight file, e.g. ``"200MB"`` or bytes; a larger tensor has a file of its own.
        source: The model directory that training began with, whose generation config is kept.

    Raises:
        ConfigError: If ``max_shard_size`` is not a size.
        CheckpointError: If something cannot be written, on all ranks alike; the directory's old weights are whole then.
    """
    largest = size_in_bytes(max_shard_size)
    gathering = _Gathering(chunks, model)
    files = files_of(gathering.contents, largest)
    target = Directory(Path(directory), files) if dist.get_rank() == 0 else None
    config = saved_config(hf_config, model, gathering.contents)
    try:
        on_all_ranks_alike(lambda: target.begin(config, generation_config(source)) if target else None)
        with progress_bar("saving weights", sum(file.num_bytes for file in files)) as bar:
            for file in files:
                failure: Exception | None = None
                for name in file.names:
                    tensor = gathering.next()
                    if target is None or tensor is None or failure is not None:
                        continue
                    try:
                        target.write(name, tensor)
                    except Exception as error:  # the other ranks go on sending until the end of this file
                        failure = error
                    bar.update(tensor.numel() * tensor.element_size())
                on_all_ranks_alike(lambda error=failure: _raise(error))  # type: ignore[misc]
        on_all_ranks_alike(lambda: target.finish() if target else None)
    finally:
        if target is not None:
            target.discard()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


# ---- gathering ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A shard of some rank."""

    rank: int
    place: Place
    number: int
    """Among that rank's shards."""


class _Gathering:
    """Puts tensors together on rank 0 in an order that all ranks know; ``next`` is called by all as often."""

    def __init__(self, chunks: Iterable[Any], model: ModelConfig) -> None:
        self._rules = rules_of(model)
        self._group = host_group(_TIMEOUT)
        self._rank = dist.get_rank()
        self._mine = shards_of(chunks, self._rules, model)
        self._groups = _in_order(self._rules, model, self._sources())
        self.contents: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """Shape and dtype of each tensor, in the order of ``next``."""
        for sources in self._groups:
            place = sources[0].place
            rule = self._rules[place.rule]
            shapes = shapes_of(rule, place)
            self.contents |= {n: (s, place.dtype) for n, s in zip(names_of(rule, place.layer), shapes, strict=True)}
        self._tensors = self._gathered()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors, in the order of ``next``."""
        return tuple(self.contents)

    def next(self) -> torch.Tensor | None:
        """The next tensor on rank 0, None elsewhere."""
        return next(self._tensors)

    def _sources(self) -> list[_Source]:
        """One shard for each part of the model: that of the first copy, on the first rank that holds it."""
        mine = [(i, shard.place) for i, shard in enumerate(self._mine) if shard.is_first_copy]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine, group=self._group)
        sources: dict[Any, _Source] = {}
        for rank, places in enumerate(of_ranks):
            for number, place in places:
                key = (place.rule, place.layer, place.offset)
                sources.setdefault(key, _Source(rank=rank, place=place, number=number))
        return list(sources.values())

    def _gathered(self) -> Iterator[torch.Tensor | None]:
        for sources in self._groups:
            rule = self._rules[sources[0].place.rule]
            if self._rank != 0:
                for source in sources:
                    if source.rank == self._rank:
                        dist.send(_bytes(self._mine[source.number]), 0, group=self._group)
                yield from [None] * len(rule.hugging_face)
                continue
            shapes = shapes_of(rule, sources[0].place)
            names = names_of(rule, sources[0].place.layer)
            whole = [
                Filling(name, torch.empty(shape, dtype=sources[0].place.dtype))
                for name, shape in zip(names, shapes, strict=True)
            ]
            for source in sources:
                _insert(whole, self._received(source), rule, source.place)
            while whole:
                yield whole.pop(0).whole()

    def _received(self, source: _Source) -> torch.Tensor:
        if source.rank == 0:
            return self._mine[source.number].data.cpu()
        place = source.place
        buffer = torch.empty(math.prod(place.size) * place.dtype.itemsize, dtype=torch.uint8)
        dist.recv(buffer, source.rank, group=self._group)
        return buffer.view(place.dtype).view(place.size)


def _bytes(shard: Shard) -> torch.Tensor:
    """As bytes, since gloo does not send every dtype."""
    return shard.data.cpu().contiguous().view(-1).view(torch.uint8)


def _in_order(rules: Sequence[Rule], model: ModelConfig, sources: Iterable[_Source]) -> list[list[_Source]]:
    """The shards of each tensor, in the order of ``tensor_shapes``."""
    by_tensor: dict[Key, list[_Source]] = {}
    for source in sources:
        by_tensor.setdefault(Key(rules[source.place.rule].megatron, source.place.layer), []).append(source)
    in_order = [by_tensor[key] for key in tensor_shapes(model) if key in by_tensor]
    return [sorted(each, key=lambda source: source.place.offset) for each in in_order]


def _insert(whole: list[Filling], data: torch.Tensor, rule: Rule, place: Place) -> None:
    """Copy one shard into the Hugging Face tensors that its rows belong to: ``load`` backwards."""
    for piece in pieces(rule, place):
        rows, values = index(piece.theirs), data[index(piece.ours)]
        if rule.transposed:
            whole[piece.tensor].put((columns(place), rows), values.t())
        else:
            whole[piece.tensor].put((rows, columns(place)) if values.dim() > 1 else rows, values)
