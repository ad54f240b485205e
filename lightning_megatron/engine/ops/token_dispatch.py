"""Dispatchers, which send tokens to the ranks of their experts and sum the experts' outputs.

Megatron's MoEAlltoAllTokenDispatcher sends a token once for each of its experts, synchronizes the host with the GPU
three times per layer even at ep=1, copies all tokens in chunks per expert, and sums outputs by atomic additions in
bf16, whose order differs between runs. Here:

- A token is sent to a rank once, however many of its experts are there, with their indices and probabilities; the
  outputs of these experts are summed there. With 8 experts over 2 (4) ranks that is a fourth (0.45) of the rows.
- The host synchronizes once per layer, for the message sizes that NCCL needs, and not at all at ep=1, or if rows are
  all-gathered (gathered_dispatch.py).
- With recompute="selective" the input rows of experts, topk times the tokens, are gathered again in the backward pass
  instead of being kept: 32 of 140 kB per token and layer of Qwen3-30B-A3B.
- Sums are computed in a fixed order, in fp32, and rounded once: runs are reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.recompute import RecomputedOutput, recomputes_cheap_outputs


class Permutation(NamedTuple):
    """Rows sorted by destination; a row with several destinations is repeated, once for each."""

    positions: Tensor
    """[n, k], int64: position of each assignment; ``total`` for those without a destination."""
    ends: Tensor
    """[destinations], int32: end of each destination's positions. Positions from the last end on are spare."""
    total: int
    """Number of positions."""


def sort_rows(destinations: Tensor, count: int, total: int) -> Permutation:
    """Sort rows by their destinations, without host synchronization.

    Args:
        destinations: [n, k], int64: from 0, different within a row; ``count`` or more for none.
        count: Number of destinations.
        total: Number of positions: at least that of the elements of ``destinations`` that are less than ``count``.
    """
    assert destinations.dtype is torch.int64, f"expected int64, got {destinations.dtype}"
    if destinations.is_cuda:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.row_order import MAX_DESTINATIONS, sorted_order

        if count <= MAX_DESTINATIONS:
            return Permutation(*sorted_order(destinations, count, total), total)
    keys, order = destinations.flatten().to(torch.int16).sort(stable=True)
    indices = torch.arange(len(order), device=order.device)
    positions = torch.empty_like(order).scatter_(0, order, indices).view_as(destinations)
    destination = torch.arange(count, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, destination, right=True, out_int32=True)
    return Permutation(positions.where(destinations < count, total), ends, total)


def sort_factors(factors: Tensor, order: Permutation) -> Tensor:
    """Factors of assignments, [n, k], in the order of their destinations, [sorted]; 0 at spare positions.

    Whatever the gradients of spare positions are, none of them is that of a factor.
    """
    # The last element is of all assignments without a destination.
    positions = order.positions.flatten()
    sorted_factors = factors.new_zeros(order.total + 1).scatter(0, positions, factors.flatten())
    return sorted_factors[: order.total]


def _copy_rows(x: Tensor, order: Permutation) -> Tensor:
    """Copy rows of ``x``, [n, h], to their positions: [sorted, h]; spare positions hold anything."""
    if x.is_cuda:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.expert_rows import copy_rows

        return copy_rows(x, order.positions, order.total)
    exists = order.positions < order.total
    copied = x.new_empty(order.total, x.shape[1])
    copied[order.positions[exists]] = x[exists.nonzero()[:, 0]]
    return copied


def _sum_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Sum the rows of ``x``, [m, h], at ``positions``, [n, k], in fp32: [n, h]; position m stands for no row."""
    if x.is_cuda:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.expert_rows import row_sums

        return row_sums(x, positions)
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    dtype = torch.promote_types(x.dtype, torch.float32)
    return padded[positions].sum(dim=1, dtype=dtype).to(x.dtype)


class _Permute(torch.autograd.Function):
    """Permute rows, or sum them back (``inverse``); each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        order: Permutation,
        inverse: bool,
    ) -> Tensor:
        ctx.order = order
        ctx.inverse = inverse
        if inverse:
            return _sum_rows(x, order.positions)
        return _copy_rows(x, order)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = upstream
        if ctx.inverse:
            d_x = _copy_rows(gradient, ctx.order)
        else:
            d_x = _sum_rows(gradient, ctx.order.positions)
        return d_x, None, None


def permute(x: Tensor, order: Permutation) -> Tensor:
    """Rows of ``x``, [n, h], in the order of their destinations: [sorted, h]."""
    rows: Tensor = _Permute.apply(x, order, False)  # type: ignore[no-untyped-call]
    return rows


def unpermute(x: Tensor, order: Permutation) -> Tensor:
    """Sum of each row's results, [n, h] of ``x`` [sorted, h]; in fp32, rounded once."""
    sums: Tensor = _Permute.apply(x, order, True)  # type: ignore[no-untyped-call]
    return sums


def select_experts(
    metadata: Tensor,
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Probabilities and local expert indices, [n, topk] each, of rows that came from other ranks.

    Args:
        metadata: [n, 2 * topk]: probabilities, and indices among all experts.
        first: Index of this rank's first expert.
        count: Number of this rank's experts, which is also the index of experts of other ranks.
    """
    probs, indices = metadata.chunk(2, dim=1)
    experts = indices.detach().long() - first
    is_local = (experts >= 0) & (experts < count)
    return probs, experts.where(is_local, count)


class Dispatcher(MoETokenDispatcher):
    """Token dispatcher with all experts on this rank (ep=1); ``MoELayer`` calls its methods in this order.

    It keeps the state of one pass through the layer.
    """

    _shape: torch.Size
    _experts: Tensor
    _num_assignments: int
    _to_experts: Permutation

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Accept the arguments of Megatron's own dispatchers."""
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_local = num_local_experts
        self._first = local_expert_indices[0]
        self._permuted = RecomputedOutput()

    def dispatch_preprocess(
        self,
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Prepare the rows to send to each rank.

        Args:
            tokens: [s or s/tp, b, h], n tokens.
            routing_map: [n, topk], int64: the experts of each token.
            probs: [n, topk], fp32: factors of their outputs.

        Returns:
            Rows, [n, h], and ``probs``; with several ranks more rows, and for each row the probabilities and the
            indices of its experts, [rows, 2 * topk], fp32.
        """
        self._shape = tokens.shape
        self._experts = routing_map
        self._num_assignments = routing_map.numel()
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the ranks of their experts; collective over the ep group."""
        return tokens, probs

    def _select_local(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and local expert indices of received rows, [rows, topk] each.

        Experts of other ranks have the index ``_num_local``.
        """
        return probs, self._experts

    def dispatch_postprocess(
        self,
        tokens: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by expert; returns the arguments of ``GroupedExperts``."""
        probs, experts = self._select_local(probs)
        self._to_experts = order = sort_rows(experts, self._num_local, self._num_assignments)
        if recomputes_cheap_outputs(self.config):
            rows = self._permuted.checkpoint(permute, tokens, order)
        else:
            rows = permute(tokens, order)
        return rows, order.ends, sort_factors(probs, order)

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """Sum the outputs of this rank's experts for each row."""
        self._permuted.discard_output_and_register_recompute(outputs)
        self._permuted = RecomputedOutput()
        return unpermute(outputs, self._to_experts)

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Send the sums back to the ranks of their tokens; collective over the ep group."""
        return outputs

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Sum the results of all ranks for each token, [s or s/tp, b, h]."""
        return outputs.view(self._shape)


class AllToAllDispatcher(Dispatcher):
    """Sends each rank of the ep group the rows of its experts; replaces ``MoEAlltoAllTokenDispatcher``."""

    _to_ranks: Permutation
    _splits: tuple[list[int], list[int]]

    @cached_property
    def _ranks(self) -> Tensor:
        return torch.arange(self.ep_size, device=torch.cuda.current_device())

    def dispatch_preprocess(
        self,
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher``; rows are sorted by rank."""
        tokens, _ = super().dispatch_preprocess(tokens, routing_map, probs)
        is_on_rank = (routing_map // self._num_local)[:, :, None] == self._ranks
        is_sent = is_on_rank.any(dim=1)
        num_rows = is_sent.sum(dim=0)
        num_assignments = is_on_rank.sum(dim=(0, 1))
        # For each destination rank (rows, assignments to its experts).
        counts = torch.stack((num_rows, num_assignments), dim=1)
        all_counts = counts.new_empty(self.ep_size * len(counts), 2)
        dist.all_gather_into_tensor(all_counts, counts, group=self.ep_group)
        all_counts = all_counts.view(self.ep_size, *counts.shape)
        rank = self.ep_group.rank()
        # One copy to the host.
        to_ranks, from_ranks = torch.stack((all_counts[rank], all_counts[:, rank])).tolist()
        rows_sent = [rows for rows, _ in to_ranks]
        rows_received = [rows for rows, _ in from_ranks]
        self._splits = (rows_sent, rows_received)
        self._num_assignments = sum(assignments for _, assignments in from_ranks)
        self._to_ranks = sort_rows(
            self._ranks.where(is_sent, self.ep_size),
            self.ep_size,
            sum(rows_sent),
        )
        metadata = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        return permute(tokens, self._to_ranks), permute(metadata, self._to_ranks)

    def _select_local(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        return select_experts(probs, self._first, self._num_local)

    def token_dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher``."""
        sent, received = self._splits
        tokens = all_to_all(self.ep_group, tokens, received, sent)
        probs = all_to_all(self.ep_group, probs, received, sent)
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """See ``Dispatcher``."""
        sent, received = self._splits
        back: Tensor = all_to_all(self.ep_group, outputs, sent, received)
        return back

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """See ``Dispatcher``."""
        return unpermute(outputs, self._to_ranks).view(self._shape)


def dispatcher(kind: type[Dispatcher]) -> Callable[..., Dispatcher]:
    """Factory of ``kind``, or of ``Dispatcher`` at ep=1."""

    def make(
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: ProcessGroupCollection,
    ) -> Dispatcher:
        # A rank that has all experts sends nothing.
        constructor = Dispatcher
        if pg_collection.ep.size() > 1:
            constructor = kind
        return constructor(num_local_experts, local_expert_indices, config, pg_collection)

    return make
