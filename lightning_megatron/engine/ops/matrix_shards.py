"""Who holds what of the matrices that a model's parameters consist of.

A matrix is what the model means by one: a parameter may fuse several, a tp rank may have some of its rows or columns,
and with the distributed optimizer a data-parallel rank holds a range of consecutive elements of each parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.ops.orthogonalize import iteration_flops

ROUND_ELEMENTS = 2**27
"""Elements for each rank that are exchanged at a time: this bounds the memory of an update."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """How the elements of a parameter, on one tp rank, make up matrices."""

    columns: int
    """Elements of a row on this rank."""
    blocks: tuple[tuple[int, int], ...]
    """Number of a matrix, and how many consecutive rows belong to it; in the order of the parameter's rows."""
    count: int
    """How many matrices there are; a tp rank may have no row of some."""
    axis: Literal[0, 1] | None
    """Axis that is split over tp; None for matrices of which every tp rank has all."""


class MatrixShard(NamedTuple):
    """What this rank's optimizer holds of a parameter that consists of matrices."""

    matrices: Matrices
    master: Tensor | None
    """Its master weight, or the held part of it; None if this rank holds nothing."""
    start: int
    """Index of the first element held, in row-major order."""


class MatrixGroup(NamedTuple):
    """Ranks that together hold some matrices."""

    group: dist.ProcessGroup | None
    """None for this rank alone."""
    tp_rank: int
    """This rank's position along the axis that ``Matrices`` name."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else self.group.rank()


class Slice(NamedTuple):
    """Consecutive elements of what this rank holds of a parameter."""

    begin: int
    end: int


class _Part(NamedTuple):
    """What a rank holds of a matrix: a range of its tp rank's elements of it, in row-major order."""

    tp_rank: int
    size: int
    """Elements of the matrix that the tp rank has."""
    start: int
    length: int


@dataclass(frozen=True)
class Matrix:
    """A matrix, and who holds what of it."""

    shard: int
    """Number of its parameter."""
    axis: Literal[0, 1] | None
    local_columns: int
    """Elements of a row on one tp rank."""
    parts: tuple[_Part, ...]
    """What each rank of the group holds."""
    slices: tuple[Slice, ...]
    """Where this rank holds its part, in order."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements that each tp rank has, in order; one number if all have the full matrix."""
        by_rank = {part.tp_rank: part.size for part in self.parts}
        sizes = tuple(by_rank[rank] for rank in sorted(by_rank))
        return sizes[:1] if self.axis is None else sizes

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the full matrix."""
        columns = self.local_columns
        if self.axis == 1:
            columns *= len(self.sizes)
        return sum(self.sizes) // columns, columns

    def held_by(self, rank: int) -> slice:
        """What a rank of the group holds, as a range of the elements of all tp ranks, one behind the other."""
        part = self.parts[rank]
        begin = part.start
        if self.axis is not None:
            begin += sum(self.sizes[: part.tp_rank])
        return slice(begin, begin + part.length)

    def num_held(self, rank: int) -> int:
        """How many elements a rank of the group holds."""
        return self.parts[rank].length

    def num_sent(self, rank: int) -> int:
        """How many elements a rank of the group sends to the owner: of equal copies on tp ranks, the first ones."""
        part = self.parts[rank]
        if self.axis is None and part.tp_rank > 0:
            return 0
        return part.length

    def joined(self, flat: Tensor) -> Tensor:
        """[rows, columns] from the elements of all tp ranks, one behind the other."""
        rows, columns = self.shape
        if self.axis == 1:
            of_ranks = flat.view(-1, rows, self.local_columns).transpose(0, 1)
            return of_ranks.reshape(rows, columns)
        return flat.view(rows, columns)

    def split(self, matrix: Tensor) -> Tensor:
        """Inverse of ``joined``."""
        if self.axis == 1:
            num_ranks = len(self.sizes)
            of_ranks = matrix.reshape(-1, num_ranks, self.local_columns).transpose(0, 1)
            return of_ranks.reshape(-1)
        return matrix.reshape(-1)


@dataclass(frozen=True)
class Round:
    """All matrices of some parameters, which are exchanged together."""

    shards: tuple[int, ...]
    """Numbers of the parameters."""
    of_owners: tuple[tuple[Matrix, ...], ...]
    """The matrices that each rank of the group owns."""

    def __iter__(self) -> Iterator[Matrix]:
        """The matrices, in the order of their owners."""
        return itertools.chain.from_iterable(self.of_owners)


def locate(
    shards: Sequence[MatrixShard],
    ranks: MatrixGroup,
    device: torch.device,
) -> list[Matrix]:
    """All matrices of ``shards``. Collective over the group, whose ranks have the same parameters in the same order."""
    held = [(index, *each) for index, shard in enumerate(shards) for each in _held_matrices(shard)]
    if not held:
        return []
    numbers = [(ranks.tp_rank, size, start, _length(slices)) for _, size, start, slices in held]
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    tables = [own]
    if ranks.group is not None:
        tables = [torch.empty_like(own) for _ in range(ranks.size)]
        dist.all_gather(tables, own, group=ranks.group)
    of_ranks = [table.tolist() for table in tables]
    matrices = []
    for number, (index, _, _, slices) in enumerate(held):
        layout = shards[index].matrices
        parts = tuple(_Part(*table[number]) for table in of_ranks)
        matrices.append(Matrix(index, layout.axis, layout.columns, parts, slices))
    return matrices


def _length(slices: Sequence[Slice]) -> int:
    return sum(each.end - each.begin for each in slices)


def _held_matrices(
    shard: MatrixShard,
) -> Iterator[tuple[int, int, tuple[Slice, ...]]]:
    """For each matrix of a parameter: this tp rank's elements, the first one held, and where the held ones are."""
    start = shard.start
    stop = start
    if shard.master is not None:
        stop += shard.master.numel()
    matrices = shard.matrices
    sizes = [0] * matrices.count
    before = [0] * matrices.count
    slices: list[list[Slice]] = [[] for _ in range(matrices.count)]
    begin = 0
    for number, rows in matrices.blocks:
        end = begin + rows * matrices.columns
        first = max(begin, start)
        last = min(end, stop)
        sizes[number] += end - begin
        if first < last:
            slices[number].append(Slice(first - start, last - start))
        if not slices[number]:
            before[number] += end - begin
        elif len(slices[number]) == 1 and first < last:
            before[number] += first - begin
        begin = end
    for number in range(matrices.count):
        yield sizes[number], before[number], tuple(slices[number])


def assign(matrices: Sequence[Matrix], num_ranks: int) -> list[Round]:
    """Choose the owner of each matrix, so that in each round all ranks have about the same work."""
    rounds = []
    waiting: list[Matrix] = []
    elements = 0
    for _, of_parameter in itertools.groupby(matrices, key=lambda matrix: matrix.shard):
        if elements >= ROUND_ELEMENTS * num_ranks:
            rounds.append(_balanced(waiting, num_ranks))
            waiting = []
            elements = 0
        for matrix in of_parameter:
            waiting.append(matrix)
            elements += sum(matrix.sizes)
    if waiting:
        rounds.append(_balanced(waiting, num_ranks))
    return rounds


def _balanced(matrices: Sequence[Matrix], num_ranks: int) -> Round:
    """Largest first, each to the rank with the least work so far."""
    owned: list[list[Matrix]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for matrix in sorted(matrices, key=lambda each: -iteration_flops(*each.shape)):
        rank = work.index(min(work))
        owned[rank].append(matrix)
        work[rank] += iteration_flops(*matrix.shape)
    shards = tuple(dict.fromkeys(matrix.shard for matrix in matrices))
    return Round(shards, tuple(tuple(each) for each in owned))
