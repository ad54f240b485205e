"""Exchange of experts' rows without host waits: all-gather, and reduce-scatter of the experts' outputs.

The all-to-all (token_dispatch.py) needs the sizes of its messages on the host, which waits for them once per layer and
microbatch: with experts on two H200s a kernel ran in 78 % of the time. Here the host knows every size in advance:

- All ranks gather the rows of all, of which each has as many. Replicas with shorter sequences are padded with rows
  without experts to the longest; the hosts agree on it once per batch (``equal_rows``).
- Buffers of experts' rows have room for the worst case, in which all tokens of the group select the experts of one
  rank: ep * min(topk, experts/ep) rows for each of its own. Only the device knows how many there are. Grouped products
  end at the last of them, kernels of rows skip the others (triton/expert_rows.py), and no token is dropped.

**Memory** depends on ep and not on the routing. Kept for a token and layer in bf16: ep * min(topk, experts/ep) rows of
experts with 2 * h + 6 * ffn bytes; with recompute="selective" only the gathered rows, 2 * ep * h bytes, but then the
first product of the experts is computed again, 2/9 of their FLOPs. Qwen3-30B-A3B (h 2,048, ffn 768, topk 8):

    | kB a token and layer                 | ep=2 | ep=8 |
    | all-gather, any routing              |  139 |  557 |
    | all-gather, recompute="selective"    |    8 |   33 |
    | all-to-all, balanced                 |   70 |   70 |
    | the same, recompute="selective"      |   33 |   46 |
    | all-to-all, all tokens to one rank   |  139 |  557 |
    | the same, recompute="selective"      |   57 |  229 |

While a layer runs backwards, its gradients take up to 57 kB * ep more, and what it recomputes 70; half with halves.

**Bytes sent**: (ep - 1) / ep of all rows in either direction, however few a rank needs. With topk 8 that is 0.4 % more
than by all-to-all at ep=2, 11 % at ep=4 and 52 % at ep=8.

**Halves.** From ``HALVES_FROM`` ranks on the rows are exchanged in two halves, each under the products of the other, in
both passes. Weight gradients are then added twice, and autograd sums what stands for them: with 302 M weights (ep=2)
1 ms more, where all copies of a layer take 0.5. Estimates, from the bandwidth of NCCL and of memory.

Rejected: reading rows of other ranks in the kernel that sorts them (symmetric memory): it needs windows for all layers'
rows, or a barrier and a second exchange to sort them again in the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.ops.recompute import RecomputedOutput, recomputes_cheap_outputs
from lightning_megatron.engine.ops.token_dispatch import (
    Dispatcher,
    permute,
    select_experts,
    sort_factors,
    sort_rows,
    unpermute,
)

HALVES_FROM = 8
"""Ranks from which on rows are exchanged in two halves."""


def has_spare_rows(config: TransformerConfig) -> bool:
    """Whether rows of experts may end before their buffer does: with ``AllGatherDispatcher``."""
    gathers: bool = config.moe_token_dispatcher_type == "allgather"
    return gathers and config.expert_model_parallel_size > 1


class _Exchange:
    """An all-gather of rows, [n, h] to [size * n, h], or a reduce-scatter, beside what runs from start to finish.

    The gradient is the other collective, and runs beside the gradients of the same.
    """

    def __init__(self, group: dist.ProcessGroup, *, gathers: bool) -> None:
        self._group = group
        self._gathers = gathers
        self._pending: tuple[Any, Tensor, Tensor] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start to exchange ``x``; the result must only be read after ``finish``. Collective over the group."""
        started: Tensor = _Start.apply(x, self)  # type: ignore[no-untyped-call]
        return started

    def finish(self, started: Tensor) -> Tensor:
        """Wait on the current stream for the result of ``start``, and return it."""
        finished: Tensor = _Finish.apply(started, self)  # type: ignore[no-untyped-call]
        return finished

    def launch(self, x: Tensor, *, backward: bool) -> Tensor:
        """Queue the collective, or that of the gradients, and return the tensor that it writes."""
        assert self._pending is None, "an exchange was started twice"
        x = x.contiguous()
        size = self._group.size()
        if self._gathers != backward:
            out = x.new_empty(size * len(x), *x.shape[1:])
            handle = dist.all_gather_into_tensor(out, x, self._group, async_op=True)
        else:
            out = x.new_empty(len(x) // size, *x.shape[1:])
            handle = dist.reduce_scatter_tensor(out, x, group=self._group, async_op=True)
        # Both tensors live until the collective has ended.
        self._pending = (handle, x, out)
        return out

    def wait(self) -> Tensor:
        """Let the current stream wait for what was launched, and return it."""
        assert self._pending is not None, "an exchange was finished before it was started"
        handle, _, out = self._pending
        self._pending = None
        handle.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.launch(x, backward=False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        # The upstream gradient is what ``_Finish`` has sent.
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.shape = started.shape
        exchange.wait()
        return started.view_as(started)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = upstream
        ctx.exchange.launch(gradient, backward=True)
        # Of the shape that autograd expects; ``_Start`` ignores it.
        placeholder = gradient.new_empty(()).expand(ctx.shape)
        return placeholder, None


class AllGatherDispatcher(Dispatcher):
    """All-gathers the rows of the ep group, and reduce-scatters the outputs of the experts, without host waits.

    Replaces ``MoEAllGatherTokenDispatcher``. The layer calls ``compute`` between ``token_dispatch`` and
    ``token_combine`` (``compute_by_dispatcher``).

    Attributes:
        max_rows: Largest number of rows of the ranks; None if all have the same. See ``equal_rows``.
        num_parts: Parts in which rows are exchanged, each under the products of the others.
    """

    max_rows: int | None
    num_parts: int

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """See ``Dispatcher``."""
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self.max_rows = None
        self.num_parts = 1
        if self.ep_size >= HALVES_FROM:
            self.num_parts = 2

    @override
    def dispatch_preprocess(
        self,
        tokens: Tensor,
        routing_map: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher``; rows are padded to the largest number of the group's ranks."""
        rows, _ = super().dispatch_preprocess(tokens, routing_map, probs)
        metadata = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        num_rows = len(rows)
        if self.max_rows is not None:
            num_rows = self.max_rows
        assert num_rows >= len(rows), f"expected at most {num_rows} rows, got {len(rows)}"
        if num_rows == len(rows):
            return rows, metadata
        padding = (0, 0, 0, num_rows - len(rows))
        return F.pad(rows, padding), F.pad(metadata, padding, value=-1.0)

    @override
    def token_dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """All-gather the second over the ep group: [ep * rows, 2 * topk]. ``compute`` gathers the first."""
        return tokens, gather_from_sequence_parallel_region(probs, group=self.ep_group)

    def compute(
        self,
        experts: torch.nn.Module,
        rows: Tensor,
        metadata: Tensor,
    ) -> Tensor:
        """Sum of the outputs of all experts for each row, [n, h]; collective over the ep group.

        Args:
            experts: This rank's ``GroupedExperts``.
            rows: This rank's rows, [n, h].
            metadata: Probabilities and expert indices of the rows of all ranks, [ep * n, 2 * topk], fp32.
        """
        parts = rows.chunk(self.num_parts)
        of_ranks = metadata.unflatten(0, (self.ep_size, len(rows)))
        of_parts = of_ranks.split([len(part) for part in parts], dim=1)
        arriving = []
        for part in parts:
            exchange = _Exchange(self.ep_group, gathers=True)
            arriving.append((exchange, exchange.start(part)))
        leaving = []
        for (arrival, started), of_part in zip(arriving, of_parts, strict=True):
            exchange = _Exchange(self.ep_group, gathers=False)
            outputs = self._compute_part(experts, arrival, started, of_part.flatten(0, 1), exchange)
            leaving.append((exchange, outputs))
        return torch.cat([exchange.finish(outputs) for exchange, outputs in leaving])

    def _compute_part(
        self,
        experts: torch.nn.Module,
        arrival: _Exchange,
        started: Tensor,
        metadata: Tensor,
        departure: _Exchange,
    ) -> Tensor:
        """Compute the experts of rows that arrive, and start to send their sums back.

        Args:
            experts: This rank's ``GroupedExperts``.
            arrival: The exchange of the rows.
            started: What it has started, [ep * rows, h].
            metadata: Their probabilities and expert indices, [ep * rows, 2 * topk].
            departure: The exchange of the sums.

        Returns:
            What ``departure`` has started, [rows, h].
        """
        probs, indices = select_experts(metadata, self._first, self._num_local)
        total = len(indices) * min(indices.shape[1], self._num_local)
        order = sort_rows(indices, self._num_local, total)
        factors = sort_factors(probs, order)
        rows = arrival.finish(started)
        permuted = RecomputedOutput()
        outputs, _ = experts(permuted.checkpoint(permute, rows, order), order.ends, factors)
        sums = departure.start(unpermute(outputs, order))
        if recomputes_cheap_outputs(self.config):
            # When gradients of the sums are on their way, and before the experts recompute what they made of the rows.
            permuted.discard_output_and_register_recompute(sums)
        return sums

    @override
    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Remove the padding rows, [s or s/tp, b, h]."""
        num_tokens = self._shape[:-1].numel()
        return outputs[:num_tokens].view(self._shape)


_routed_experts_compute = MoELayer.routed_experts_compute


def compute_by_dispatcher(
    self: MoELayer,
    hidden_states: Tensor,
    probs: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """``MoELayer.routed_experts_compute``, in which an ``AllGatherDispatcher`` calls the experts itself.

    No subclass of the layer: up to megatron-core 0.17 layers pass process groups to ``MoELayer`` alone, and warn.
    """
    dispatcher = self.token_dispatcher
    if isinstance(dispatcher, AllGatherDispatcher):
        return dispatcher.compute(self.experts, hidden_states, probs), None
    computed: tuple[Tensor, Tensor | None] = _routed_experts_compute(self, hidden_states, probs)
    return computed


@contextlib.contextmanager
def equal_rows(
    config: TransformerConfig,
    chunks: Iterable[torch.nn.Module],
    tokens: int,
    host_group: dist.ProcessGroup,
) -> Iterator[None]:
    """Within the context, ranks that all-gather rows pad them to the longest; collective over ``host_group``.

    The hosts agree over gloo, and do not wait for a GPU.

    Args:
        config: Config of the chunks; if it has another dispatcher nothing happens.
        chunks: Model chunks, of which the next passes are.
        tokens: Tokens of a microbatch of this rank's replica, before they are split over tp and cp.
        host_group: All ranks, over gloo.
    """
    if not has_spare_rows(config):
        yield
        return
    longest = torch.tensor(tokens)
    # A pipeline stage without experts takes part as well.
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=host_group)
    dispatchers = []
    for module in torch.nn.ModuleList(chunks).modules():
        each = getattr(module, "token_dispatcher", None)
        if isinstance(each, AllGatherDispatcher):
            dispatchers.append(each)
    ranks = config.context_parallel_size
    if config.sequence_parallel:
        ranks *= config.tensor_model_parallel_size
    for each in dispatchers:
        each.max_rows = int(longest) // ranks
    try:
        yield
    finally:
        for each in dispatchers:
            each.max_rows = None
