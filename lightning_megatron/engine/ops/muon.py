"""Muon: orthogonalized momentum of matrices of which each rank holds a part.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); Liu et al. 2025 (arXiv 2502.16982). The formula, its
constants and the dtype of the iterations are those of ``torch.optim.Muon``.

Momentum and master weights stay where Megatron has them, so checkpoints are those of any optimizer. For an update each
matrix is owned by one rank of the group that holds parts of it: the others send it their parts of the momentum, it
orthogonalizes the matrix, and sends each its part of the result. Both are sent in the dtype of the iterations, which
loses nothing. Owners are chosen so that all have about the same work.

Rejected: to orthogonalize each matrix on every rank that holds a part of it (dp times the work), and momentum of whole
matrices on their owners (gradients would have to be sent as well, and checkpoints to know another sharding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.ops import matrix_shards
from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.matrix_shards import Matrix, MatrixGroup, MatrixShard, Round
from lightning_megatron.engine.ops.orthogonalize import orthogonalize

AdjustLR = Literal["original", "match_rms_adamw"]

ITERATION_DTYPE = torch.bfloat16
"""Dtype of the iterations and of what ranks send each other."""

BATCH_ELEMENTS = 2**24
"""Elements of matrices of one shape that are orthogonalized together."""


class MatrixState(NamedTuple):
    """What an update changes of a parameter that consists of matrices, on the device; each [elements held], fp32."""

    weights: Tensor
    momentum: Tensor


class MatrixUpdates:
    """Muon's updates of the matrices of one of Megatron's optimizers."""

    def __init__(
        self,
        shards: Sequence[MatrixShard],
        ranks: MatrixGroup,
        device: torch.device,
        *,
        nesterov: bool,
        iterations: int,
        adjust_lr: AdjustLR,
    ) -> None:
        """Find out who holds what. Collective over the group, whose ranks have the same parameters in the same order.

        Args:
            shards: What this rank holds of each parameter.
            ranks: The ranks that hold the rest.
            device: Where the parameters are.
            nesterov: Whether the gradient is added to the momentum once more.
            iterations: Iterations of the orthogonalization.
            adjust_lr: How the learning rate depends on the shape of a matrix.
        """
        self._shards = tuple(shards)
        self._ranks = ranks
        self._device = device
        self._nesterov = nesterov
        self._iterations = iterations
        self._adjust_lr = adjust_lr
        self._index_of: dict[Tensor, int] = {}
        for index, shard in enumerate(shards):
            if shard.master is not None:
                self._index_of[shard.master] = index
        located = matrix_shards.locate(shards, ranks, device)
        self._rounds = matrix_shards.assign(located, ranks.size)

    def __contains__(self, master: Tensor) -> bool:
        """Whether a master weight consists of matrices."""
        return master in self._index_of

    @property
    def rounds(self) -> list[list[Tensor]]:
        """The master weights, or parts of them, that this rank holds of what each round updates."""
        return [
            [
                master
                for index in matrices.shards
                if (master := self._shards[index].master) is not None
            ]
            for matrices in self._rounds
        ]

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Iterable[Mapping[Tensor, MatrixState]],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Update momenta and master weights. Collective over the group.

        Args:
            groups: Parameter groups with ``lr``, ``weight_decay`` and ``momentum``.
            states: Of each of the ``rounds`` in turn: weights and momentum by master weight. The next one is asked for
                when a round is updated.
            grad_scale: As in ``MasterOptimizer``.
            found_inf: As in ``MasterOptimizer``.
        """
        group_of: dict[int, Mapping[str, Any]] = {}
        for group in groups:
            for master in group["params"]:
                if master in self._index_of:
                    group_of[self._index_of[master]] = group
        for matrices, of_masters in zip(self._rounds, states, strict=True):
            directions: dict[int, Tensor] = {}
            for index in matrices.shards:
                master = self._shards[index].master
                if master is None:
                    continue
                gradient = master.grad
                assert gradient is not None, "every trained weight has a gradient"
                # Eagerly it is five kernels.
                update = compiled_for(master, _update_momentum, is_dynamic=True)
                group = group_of[index]
                directions[index] = update(
                    of_masters[master].momentum,
                    gradient.view(-1),
                    grad_scale,
                    found_inf,
                    decay=group["momentum"],
                    nesterov=self._nesterov,
                    dtype=ITERATION_DTYPE,
                )
                factor = 1 - group["lr"] * group["weight_decay"]
                _decay(of_masters[master].weights, factor, found_inf)
            updates = self._exchange(matrices, directions, found_inf)
            self._apply(matrices, updates, group_of, of_masters)

    def _exchange(
        self,
        matrices: Round,
        directions: Mapping[int, Tensor],
        found_inf: Tensor | None,
    ) -> Tensor:
        """Orthogonalize the matrices of a round; returns this rank's parts of them, in the order of their owners."""
        rank = self._ranks.rank
        owned = matrices.of_owners[rank]
        received = self._all_to_all(
            _own_parts(matrices, rank, directions),
            [_num_sent(of_owner, rank) for of_owner in matrices.of_owners],
            [_num_sent(owned, other) for other in range(self._ranks.size)],
        )
        results = self._orthogonalized(owned, received, found_inf)
        return self._all_to_all(
            _parts_of_ranks(owned, results, self._ranks.size),
            [_num_held(owned, other) for other in range(self._ranks.size)],
            [_num_held(of_owner, rank) for of_owner in matrices.of_owners],
        )

    def _all_to_all(
        self,
        pieces: Iterator[Tensor],
        sent_counts: list[int],
        received_counts: list[int],
    ) -> Tensor:
        """Send ``pieces``, in the order of the ranks that get them; returns what this rank gets, in order of ranks."""
        nothing = torch.empty(0, dtype=ITERATION_DTYPE, device=self._device)
        sent = torch.cat([nothing, *pieces])
        if self._ranks.size == 1:
            return sent
        received = sent.new_empty(sum(received_counts))
        dist.all_to_all_single(
            received,
            sent,
            received_counts,
            sent_counts,
            group=self._ranks.group,
        )
        return received

    def _orthogonalized(
        self,
        owned: Sequence[Matrix],
        received: Tensor,
        found_inf: Tensor | None,
    ) -> list[Tensor]:
        """Elements of each owned matrix, those of all tp ranks one behind the other."""
        whole = self._assembled(owned, received)
        for numbers in _batches(owned):
            matrices = [owned[number].joined(whole[number]) for number in numbers]
            batch = matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)
            orthogonal = orthogonalize(batch, self._iterations, found_inf)
            for number, matrix in zip(numbers, orthogonal, strict=True):
                whole[number] = owned[number].split(matrix)
        return whole

    def _assembled(self, owned: Sequence[Matrix], received: Tensor) -> list[Tensor]:
        whole: dict[int, Tensor] = {}
        begin = 0
        for rank in range(self._ranks.size):
            for number, matrix in enumerate(owned):
                count = matrix.num_sent(rank)
                part = received[begin : begin + count]
                begin += count
                if count == sum(matrix.sizes):
                    whole[number] = part
                elif count:
                    if number not in whole:
                        whole[number] = received.new_empty(sum(matrix.sizes))
                    whole[number][matrix.held_by(rank)] = part
        return [whole[number] for number in range(len(owned))]

    def _apply(
        self,
        matrices: Round,
        updates: Tensor,
        group_of: Mapping[int, Mapping[str, Any]],
        of_masters: Mapping[Tensor, MatrixState],
    ) -> None:
        begin = 0
        for matrix in matrices:
            ratio = _lr_ratio(self._adjust_lr, *matrix.shape)
            for part in matrix.slices:
                master = self._shards[matrix.shard].master
                assert master is not None
                end = begin + part.end - part.begin
                weights = of_masters[master].weights[part.begin : part.end]
                weights.add_(updates[begin:end], alpha=-ratio * group_of[matrix.shard]["lr"])
                begin = end


def _update_momentum(
    momentum: Tensor,
    gradient: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    decay: float,
    nesterov: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Update a momentum, [n]; returns what is to be orthogonalized, [n] in ``dtype``."""
    if grad_scale is not None:
        gradient = gradient / grad_scale
    if found_inf is not None:
        # So that the momentum stays as it is.
        gradient = torch.where(found_inf == 0, gradient, momentum)
    momentum.lerp_(gradient, 1 - decay)
    direction = momentum
    if nesterov:
        direction = gradient.lerp(momentum, decay)
    return direction.to(dtype)


def _decay(weights: Tensor, factor: float, found_inf: Tensor | None) -> None:
    if found_inf is None:
        weights.mul_(factor)
    else:
        weights.mul_(torch.where(found_inf == 0, factor, 1.0))


def _lr_ratio(adjust_lr: AdjustLR, rows: int, columns: int) -> float:
    """Factor of the learning rate of a matrix."""
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _num_sent(matrices: Sequence[Matrix], rank: int) -> int:
    return sum(matrix.num_sent(rank) for matrix in matrices)


def _num_held(matrices: Sequence[Matrix], rank: int) -> int:
    return sum(matrix.num_held(rank) for matrix in matrices)


def _own_parts(
    matrices: Round,
    rank: int,
    directions: Mapping[int, Tensor],
) -> Iterator[Tensor]:
    """What a rank sends to the owners of the matrices of a round."""
    for matrix in matrices:
        if matrix.num_sent(rank):
            for part in matrix.slices:
                yield directions[matrix.shard][part.begin : part.end]


def _parts_of_ranks(
    owned: Sequence[Matrix],
    results: Sequence[Tensor],
    num_ranks: int,
) -> Iterator[Tensor]:
    """What an owner sends back to each rank."""
    for rank in range(num_ranks):
        for matrix, elements in zip(owned, results, strict=True):
            yield elements[matrix.held_by(rank)]


def _batches(owned: Sequence[Matrix]) -> Iterator[list[int]]:
    """Numbers of matrices of one shape that are orthogonalized together."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(owned):
        by_shape.setdefault(matrix.shape, []).append(number)
    for (rows, columns), numbers in by_shape.items():
        size = max(1, BATCH_ELEMENTS // (rows * columns))
        for begin in range(0, len(numbers), size):
            yield numbers[begin : begin + size]
