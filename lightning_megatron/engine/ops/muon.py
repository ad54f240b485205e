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

import itertools
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
            updates = self._exchange(matrices, directions, found_inf)
            self._apply(matrices, updates, group_of, of_masters, found_inf)

    def _exchange(
        self,
        matrices: Round,
        directions: Mapping[int, Tensor],
        found_inf: Tensor | None,
    ) -> list[Tensor]:
        """Orthogonalize the matrices of a round; returns this rank's part of each, in the order of their owners."""
        ranks = range(self._ranks.size)
        rank = self._ranks.rank
        owned = matrices.of_owners[rank]
        received = self._all_to_all(
            [_own_parts(of_owner, rank, directions) for of_owner in matrices.of_owners],
            [[matrix.num_sent(other) for matrix in owned] for other in ranks],
        )
        results = self._orthogonalized(owned, received, found_inf)
        parts = self._all_to_all(
            [_parts_of_rank(other, owned, results) for other in ranks],
            [[matrix.num_held(rank) for matrix in of_owner] for of_owner in matrices.of_owners],
        )
        return list(itertools.chain.from_iterable(parts))

    def _all_to_all(
        self,
        sent: Sequence[Sequence[Tensor]],
        received_sizes: Sequence[Sequence[int]],
    ) -> list[list[Tensor]]:
        """Send each rank the parts of matrices that are for it; returns those from each rank.

        Args:
            sent: Parts for each rank, in the order of its matrices.
            received_sizes: Elements of each part that is received from each rank.
        """
        if self._ranks.size == 1:
            # As they are: copies took 4 ms of 96 for the matrices of a Llama with a billion parameters.
            return [list(parts) for parts in sent]
        nothing = torch.empty(0, dtype=ITERATION_DTYPE, device=self._device)
        sent_parts = torch.cat([nothing, *itertools.chain.from_iterable(sent)])
        received_counts = [sum(sizes) for sizes in received_sizes]
        received = sent_parts.new_empty(sum(received_counts))
        dist.all_to_all_single(
            received,
            sent_parts,
            received_counts,
            [sum(part.numel() for part in parts) for parts in sent],
            group=self._ranks.group,
        )
        return [
            list(of_rank.split(list(sizes)))
            for of_rank, sizes in zip(received.split(received_counts), received_sizes, strict=True)
        ]

    def _orthogonalized(
        self,
        owned: Sequence[Matrix],
        received: Sequence[Sequence[Tensor]],
        found_inf: Tensor | None,
    ) -> list[Tensor]:
        """Elements of each owned matrix, those of all tp ranks one behind the other.

        Args:
            owned: The matrices.
            received: What each rank sent of each.
            found_inf: As in ``step``.
        """
        whole = [
            _assembled(matrix, parts)
            for matrix, parts in zip(owned, zip(*received, strict=True), strict=True)
        ]
        for numbers in _batches(owned):
            matrices = [owned[number].joined(whole[number]) for number in numbers]
            batch = matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)
            orthogonal = orthogonalize(batch, self._iterations, found_inf)
            for number, matrix in zip(numbers, orthogonal, strict=True):
                whole[number] = owned[number].split(matrix)
        return whole

    def _apply(
        self,
        matrices: Round,
        updates: Sequence[Tensor],
        group_of: Mapping[int, Mapping[str, Any]],
        of_masters: Mapping[Tensor, MatrixState],
        found_inf: Tensor | None,
    ) -> None:
        """Decay the weights of this rank's parts of matrices, and add their updates."""
        on_device: dict[float, Tensor] = {}

        def scalar(value: float) -> Tensor:
            # A tensor, as a function would be compiled again for each learning rate.
            if value not in on_device:
                on_device[value] = torch.full((), value, device=self._device)
            return on_device[value]

        for matrix, update in zip(matrices, updates, strict=True):
            master = self._shards[matrix.shard].master
            if master is None:
                continue
            group = group_of[matrix.shard]
            decay = scalar(1 - group["lr"] * group["weight_decay"])
            step_size = scalar(-group["lr"] * _lr_ratio(self._adjust_lr, *matrix.shape))
            add = compiled_for(master, _add_update, is_dynamic=True)
            begin = 0
            for part in matrix.slices:
                end = begin + part.end - part.begin
                weights = of_masters[master].weights[part.begin : part.end]
                add(weights, update[begin:end], decay, step_size, found_inf)
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


def _add_update(
    weights: Tensor,
    update: Tensor,
    decay: Tensor,
    step_size: Tensor,
    found_inf: Tensor | None,
) -> None:
    """Multiply ``weights``, [n], by ``decay`` and add ``step_size`` times ``update``, which is 0 after an overflow."""
    if found_inf is not None:
        decay = torch.where(found_inf == 0, decay, 1.0)
    weights.mul_(decay).add_(update.float() * step_size)


def _lr_ratio(adjust_lr: AdjustLR, rows: int, columns: int) -> float:
    """Factor of the learning rate of a matrix."""
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _own_parts(
    matrices: Sequence[Matrix],
    rank: int,
    directions: Mapping[int, Tensor],
) -> list[Tensor]:
    """What a rank sends to the owner of ``matrices``: its part of each, but of those of which another sends a copy."""
    parts = []
    for matrix in matrices:
        slices = matrix.slices if matrix.num_sent(rank) else ()
        pieces = [directions[matrix.shard][each.begin : each.end] for each in slices]
        if len(pieces) == 1:
            parts.append(pieces[0])
        elif pieces:
            parts.append(torch.cat(pieces))
    return parts


def _parts_of_rank(
    rank: int,
    owned: Sequence[Matrix],
    results: Sequence[Tensor],
) -> list[Tensor]:
    """What an owner sends back to a rank: its part of each matrix."""
    return [elements[matrix.held_by(rank)] for matrix, elements in zip(owned, results, strict=True)]


def _assembled(matrix: Matrix, parts: Sequence[Tensor]) -> Tensor:
    """Elements of a matrix, those of all tp ranks one behind the other, of what each rank sent."""
    size = sum(matrix.sizes)
    for part in parts:
        if part.numel() == size:
            return part
    whole = parts[0].new_empty(size)
    for rank, part in enumerate(parts):
        if part.numel():
            whole[matrix.held_by(rank)] = part
    return whole


def _batches(owned: Sequence[Matrix]) -> Iterator[list[int]]:
    """Numbers of matrices of one shape that are orthogonalized together."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number, matrix in enumerate(owned):
        by_shape.setdefault(matrix.shape, []).append(number)
    for (rows, columns), numbers in by_shape.items():
        size = max(1, BATCH_ELEMENTS // (rows * columns))
        for begin in range(0, len(numbers), size):
            yield numbers[begin : begin + size]
