"""Send tokens to the ranks that hold their experts, sort them by expert, and bring the sums back (expert parallelism).

Stands in the place of megatron-core 0.16.1's ``MoEAlltoAllTokenDispatcher``, which sends a token once for each of its
experts, lets the host wait for the GPU three times a layer at ep=1 too, copies all tokens in pieces of each expert, and
adds outputs up by atomic additions in bf16: in another order in each run.

- A token goes to a rank once, however many of its experts are there, with their numbers and probabilities; what these
  experts make of it is added up there. Of 8 experts spread over 2 (4) ranks that is a fourth (0.45) of the rows.
- The host waits once a layer for the sizes of messages, which NCCL wants to know, and not at all at ep=1.
- With ``recompute="selective"`` the rows of experts, topk times what comes in, are gathered again in the backward pass
  instead of being kept: 32 of 140 kB a token and layer of Qwen3-30B-A3B.
- Each sum is made of its few addends in a fixed order, in fp32, and rounded once: runs are reproducible.

``AllGatherDispatcher`` stands in the place of ``MoEAllGatherTokenDispatcher``, which needs as many rows on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.engine.fillers.kernels import WithoutOutput, recomputes_cheap_outputs


class Places(NamedTuple):
    """Rows sorted by the number of their goal; a row may have several goals, and stands once in front of each."""

    rows: Tensor
    """[places], int64: which row stands at each place."""
    choices: Tensor
    """[places], int64: which of all goals, [n * k], each place is for."""
    places: Tensor
    """[n, k], int64: the place of each goal; the number of places for goals that do not count."""
    ends: Tensor
    """[goals], int32: where the places of each goal end."""


def sorted_by(goals: Tensor, count: int, total: int) -> Places:
    """Sort rows by their goals, without waiting for the device.

    Args:
        goals: [n, k]: from 0; ``count`` or more for none.
        count: How many goals there are.
        total: How many of ``goals`` are less than ``count``.
    """
    keys, order = goals.flatten().to(torch.int16).sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers).clamp_(max=total)
    goal = torch.arange(count, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, goal, right=True, out_int32=True)
    choices = order[:total]
    return Places(choices // goals.shape[1], choices, places.view_as(goals), ends)


def _sums(x: Tensor, places: Tensor) -> Tensor:
    """[n, h]: the sum of the rows of ``x``, [m, h], at ``places``, [n, k], in fp32; m stands for no row."""
    if x.is_cuda:
        from lightning_megatron.engine.fillers.triton_kernels import row_sums  # Triton is on GPUs only

        return row_sums(x, places)
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return padded[places].sum(dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


class _Moved(torch.autograd.Function):
    """Rows to their places, or sums of what stands there; each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Places, collects: bool) -> Tensor:
        ctx.found, ctx.collects = found, collects
        return _sums(x, found.places) if collects else x.index_select(0, found.rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), found = upstream, ctx.found
        return gradient.index_select(0, found.rows) if ctx.collects else _sums(gradient, found.places), None, None


def spread(x: Tensor, found: Places) -> Tensor:
    """Rows of ``x``, [n, h], at their places: [places, h]."""
    rows: Tensor = _Moved.apply(x, found, False)  # type: ignore[no-untyped-call]
    return rows


def collected(x: Tensor, found: Places) -> Tensor:
    """Sums of what stands at the places of each row, [n, h] of [places, h]; in fp32, rounded once."""
    sums: Tensor = _Moved.apply(x, found, True)  # type: ignore[no-untyped-call]
    return sums


class Dispatcher(MoETokenDispatcher):
    """What ``MoELayer`` calls around its experts, in this order; it keeps what one pass through the layer needs."""

    _chosen: Tensor
    _to_experts: Places
    _to_ranks: Places
    _splits: tuple[list[int], list[int]]

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Take what Megatron passes to its own dispatcher; the group ``ep`` communicates."""
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_local, self._first, self._rows = num_local_experts, local_expert_indices[0], WithoutOutput()

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Lay out what each rank gets.

        Args:
            tokens: [s or s/tp, b, h].
            routing_map: [n, topk], int64: the experts of each token, of which n = s * b.
            probs: [n, topk], fp32: what their outputs are multiplied by.

        Returns:
            Rows, [rows, h], and with each the probabilities and the numbers of its experts, [rows, 2 * topk], fp32; at
            ep=1 the arguments.
        """
        self._shape, self._chosen, self._num_choices = tokens.shape, routing_map, routing_map.numel()
        tokens = tokens.reshape(-1, tokens.shape[-1])
        if self.ep_size == 1:
            return tokens, probs
        numbers = torch.arange(self.ep_size, device=tokens.device)
        of_ranks = (routing_map // self._num_local)[:, :, None] == numbers
        goes = of_ranks.any(dim=1)
        sent = torch.stack((goes.sum(dim=0), of_ranks.sum(dim=(0, 1))), dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.ep_group)
        of_sent, of_received = torch.stack((sent, received)).tolist()
        self._splits = [rows for rows, _ in of_sent], [rows for rows, _ in of_received]
        self._num_choices = sum(choices for _, choices in of_received)
        self._to_ranks = sorted_by(numbers.where(goes, self.ep_size), self.ep_size, sum(self._splits[0]))
        with_numbers = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        return spread(tokens, self._to_ranks), spread(with_numbers, self._to_ranks)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange both over the ep group."""
        if self.ep_size == 1:
            return tokens, probs
        sent, received = self._splits
        tokens, probs = (all_to_all(self.ep_group, x, received, sent) for x in (tokens, probs))
        return tokens, probs

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by expert: the arguments of ``GroupedExperts``."""
        probs, experts = (probs, self._chosen) if self.ep_size == 1 else self._of_own_experts(probs)
        self._to_experts = found = sorted_by(experts, self._num_local, self._num_choices)
        is_kept = not recomputes_cheap_outputs(self.config)
        rows = spread(tokens, found) if is_kept else self._rows.checkpoint(spread, tokens, found)
        return rows, found.ends, probs.flatten().gather(0, found.choices)

    def _of_own_experts(self, with_numbers: Tensor) -> tuple[Tensor, Tensor]:
        """What outputs are multiplied by, and which of this rank's experts made them, [rows, topk] each.

        Those of other ranks have the number behind the last.
        """
        probs, numbers = with_numbers.chunk(2, dim=1)
        experts = numbers.detach() - self._first
        return probs, experts.where((experts >= 0) & (experts < self._num_local), self._num_local)

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """Add up what this rank's experts made of each token."""
        self._rows.discard_output_and_register_recompute(outputs)
        self._rows = WithoutOutput()
        return collected(outputs, self._to_experts)

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Exchange the sums back."""
        if self.ep_size == 1:
            return outputs
        sent, received = self._splits
        back: Tensor = all_to_all(self.ep_group, outputs, sent, received)
        return back

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Add up what the ranks sent, [s or s/tp, b, h]."""
        if self.ep_size > 1:
            outputs = collected(outputs, self._to_ranks)
        return outputs.view(self._shape)


class AllGatherDispatcher(Dispatcher):
    """Each rank of the ep group gets the rows of all, and what its experts make of them is added up and scattered.

    All messages are of one size, which the host knows: it waits for the number of this rank's rows alone, beside the
    exchange. What travels is (ep - 1) / ep of all ranks' rows in either direction, however few a rank needs: as much as
    by all-to-all where tokens have at least as many experts as there are ranks, more where they have fewer.
    """

    most_tokens: int | None = None
    """Of a microbatch, on any rank; None where all ranks have as many as this one."""

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Dispatcher``'s, of this rank's own rows and as many that no expert wants as other ranks have more."""
        if self.ep_size == 1:
            return super().dispatch_preprocess(tokens, routing_map, probs)
        self._shape, rows = tokens.shape, tokens.reshape(-1, tokens.shape[-1])
        config, missing = self.config, 0
        if self.most_tokens is not None:
            parts = config.context_parallel_size * (
                config.tensor_model_parallel_size if config.sequence_parallel else 1
            )
            missing = self.most_tokens // parts - len(rows)
        with_numbers = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        return F.pad(rows, (0, 0, 0, missing)), F.pad(with_numbers, (0, 0, 0, missing), value=-1.0)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gather both over the ep group: [ep * rows, h] and [ep * rows, 2 * topk]."""
        if self.ep_size == 1:
            return tokens, probs
        probs = gather_from_sequence_parallel_region(probs, group=self.ep_group)
        num_choices = HostCopy((self._of_own_experts(probs)[1] < self._num_local).sum())
        tokens = gather_from_sequence_parallel_region(tokens, group=self.ep_group)
        self._num_choices = int(num_choices.read())
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Add up what all ranks' experts made of this rank's rows, [rows, h]."""
        if self.ep_size == 1:
            return outputs
        sums: Tensor = reduce_scatter_to_sequence_parallel_region(outputs, group=self.ep_group)
        return sums

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Without the rows that were added, [s or s/tp, b, h]."""
        return outputs[: self._shape[:-1].numel()].view(self._shape)


def gathering_dispatchers(chunks: Iterable[torch.nn.Module]) -> list[AllGatherDispatcher]:
    """Those of all layers of ``chunks``."""
    found = (getattr(module, "token_dispatcher", None) for chunk in chunks for module in chunk.modules())
    return [dispatcher for dispatcher in found if isinstance(dispatcher, AllGatherDispatcher)]


@contextlib.contextmanager
def padded_to_most(dispatchers: list[AllGatherDispatcher], tokens: int, group: dist.ProcessGroup) -> Iterator[None]:
    """While microbatches of one size run, which may be larger on other ranks.

    Args:
        dispatchers: Of all layers.
        tokens: How many a microbatch of this rank has.
        group: The data-parallel ranks, which must all call; one all-reduce.
    """
    most = torch.tensor(tokens, device=torch.cuda.current_device())
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    for dispatcher in dispatchers:
        dispatcher.most_tokens = int(most)
    try:
        yield
    finally:
        for dispatcher in dispatchers:
            dispatcher.most_tokens = None
