"""Context parallelism: the tokens of each row sharded over the cp group, with attention over the full row.

Outside of attention a token's states depend on that token alone, so a rank computes only its own tokens. Model chunks
take and return full rows: masks, labels, losses and metrics do not depend on the sharding, and every cp rank has the
same loss (Megatron-Core shards the batch instead, and every loss function has to reduce over the cp group). Gathering
one loss per token for that is negligible beside the communication of attention, of which there are two forms:

- ``a2a`` (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509) exchanges tokens for heads. Each rank attends with
  its share of the heads over full rows in order, so documents, windows, ALiBi, biases and dropout work as on one rank,
  with the same kernels. Two all-to-alls of a rank's shard per layer, forward and backward; GPUs of one host copy into
  each other's memory instead (``peer_copies.py``). Each rank owns one contiguous run of tokens.
- ``all_gather`` (Llama 3, arXiv 2407.21783, section 3.3.2) where there are too few key/value heads for that: each rank
  attends with its own queries to the keys and values of all ranks. Each rank owns two runs of tokens, the r-th from the
  beginning and the r-th from the end (zigzag), to balance causal attention, in which later tokens cost more. Attention
  of a run to all keys up to its end is causal attention with fewer queries than keys, which ``SDPAttention`` computes
  for cached keys, too. Gradients of keys and values are reduce-scattered in float32.

A ring exchange of keys and values (Megatron's ``p2p``) needs the softmax denominators of each part, which torch's
kernels do not return for masked attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.ops import peer_copies
from lightning_megatron.engine.ops.attention import CAUSAL, MASK_CACHE, SDPAttention
from lightning_megatron.engine.ops.masks import Alibi
from lightning_megatron.engine.ops.narrow_values import padded_values
from lightning_megatron.engine.ops.peer_copies import Collectives


@dataclass(frozen=True)
class ContextParallel:
    """Sharding of a row's tokens over the cp group; at cp=1, and during generation, every rank owns all tokens."""

    config: TransformerConfig
    """The model's config; its ``context_parallel_size`` and ``cp_comm_type`` are read at each call."""

    @property
    def size(self) -> int:
        """Number of ranks that share a row."""
        size: int = self.config.context_parallel_size
        return size

    @property
    def group(self) -> dist.ProcessGroup:
        """The context-parallel process group."""
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    @property
    def rank(self) -> int:
        """This process's rank in the cp group."""
        return self.group.rank()

    @property
    def exchanges_heads(self) -> bool:
        """Whether each rank attends with a share of the heads over full rows (``a2a``)."""
        return self.size > 1 and self.config.cp_comm_type == "a2a"

    def own_heads(self, full: Tensor, dim: int) -> Tensor:
        """Slice a per-head tensor to the heads that this rank attends with."""
        if not self.exchanges_heads:
            return full
        return full.chunk(self.size, dim)[self.rank]

    def own_queries(self, full: Tensor, dim: int) -> Tensor:
        """Slice a per-query tensor to the queries that this rank attends with."""
        if self.exchanges_heads:
            return full
        return self.own_tokens(full, dim)

    def own_tokens(
        self,
        full: Tensor,
        dim: int = 1,
        rank: int | None = None,
    ) -> Tensor:
        """Slice a per-token tensor to the tokens of this rank (or of ``rank``), in order.

        Args:
            full: Of the full row along ``dim``, whose length 2 x cp divides.
            dim: Token dimension.
            rank: Another rank of the cp group; None for this one.
        """
        n = self.size
        if n == 1:
            return full
        if rank is None:
            rank = self.rank
        if self.exchanges_heads:
            return full.chunk(n, dim)[rank]
        runs = full.chunk(2 * n, dim)
        return torch.cat((runs[rank], runs[2 * n - 1 - rank]), dim)

    def gather_tokens(self, own: Tensor, dim: int = 1) -> Tensor:
        """All-gather tokens into full rows, the inverse of ``own_tokens``; collective over the cp group.

        All ranks compute the same from the result, so each has the gradient of the full rows: the backward pass slices
        it, without a reduction.

        Args:
            own: This rank's tokens.
            dim: Token dimension.
        """
        if self.size == 1:
            return own
        moved = own.transpose(0, dim).contiguous()
        gathered = gather_from_sequence_parallel_region(
            moved, tensor_parallel_output_grad=False, group=self.group
        )
        return self.restore_order(gathered).transpose(0, dim).contiguous()

    def broadcast_first_token(self, output: Tensor) -> Tensor:
        """Broadcast rank 0's output, computed from the row's first token; collective over the cp group.

        Args:
            output: Computed from the first token of this rank; of the same shape on all ranks.
        """
        if self.size == 1:
            return output
        return self.gather_tokens(output[None], 0)[0]

    def sum_parts(self, part: Tensor) -> Tensor:
        """All-reduce what each rank has computed a part of; collective over the cp group.

        All ranks compute the same from the sum, so the backward pass returns its gradient to each, without a reduction.

        Args:
            part: Of the same shape on all ranks.
        """
        if self.size == 1:
            return part
        # megatron-core 0.16.1, tensor_parallel/mappings.py:_reduce returns its input, summed only if contiguous.
        total: Tensor = reduce_from_tensor_model_parallel_region(
            part.contiguous(), group=self.group
        )
        return total

    def restore_order(self, gathered: Tensor) -> Tensor:
        """Reorder tokens that were gathered rank by rank into the order of the row, along the first dimension."""
        n = self.size
        if self.exchanges_heads:
            return gathered
        runs = gathered.chunk(2 * n)
        # Rank r owns the runs r and 2n - 1 - r.
        return torch.cat([*runs[::2], *runs[:0:-2]])


class ContextParallelAttention(SDPAttention):
    """``SDPAttention`` for queries, keys and values that are sharded over the cp group."""

    collectives: Collectives | None = None
    """Implementation of the all-to-all; None for NCCL or gloo."""

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention output, [sq/cp, b, np * hn]; collective over the cp group.

        Args:
            query: [sq/cp, b, np, hn].
            key: [sk/cp, b, ng, hn]; ng divides np.
            value: [sk/cp, b, ng, hn].
            attention_mask: Mask of the full rows, as for ``SDPAttention``; with causal attention [b, sk].
            attn_mask_type: Replaces the layer's mask type for this call.
            attention_bias: Bias of the heads and queries that this rank attends with (``own_heads``,
                ``own_queries``) and all keys.
            packed_seq_params: Unused.
        """
        context = ContextParallel(self.config)
        attend = super().forward
        mask = attention_mask
        bias = attention_bias
        kind = attn_mask_type or self.attn_mask_type
        if context.size == 1:
            return attend(query, key, value, mask, kind, bias)
        if context.exchanges_heads:
            exchange = (self.collectives or Collectives(context.group)).all_to_all
            to_heads = partial(exchange, split_dim=2, concat_dim=0)
            if self.is_cross:
                (query,) = to_heads(query)
                key, value = to_heads(key, value)
            else:
                query, key, value = to_heads(query, key, value)
            output = attend(query, key, value, mask, kind, bias)
            (output,) = exchange(output, split_dim=0, concat_dim=2)
            return output
        width = value.shape[-1]
        stacked = torch.stack((key, padded_values(value, key.shape[-1])), dim=1)
        gathered: Tensor = _GatherKeys.apply(stacked, context.group)  # type: ignore[no-untyped-call]
        if kind not in CAUSAL:
            if not self.is_cross and bias is None:
                gathered, mask = _rotate_own_last(context, gathered, mask)
            else:
                gathered = context.restore_order(gathered)
            keys = gathered[:, 0]
            values = gathered[:, 1, ..., :width]
            return attend(query, keys, values, mask, kind, bias)
        gathered = context.restore_order(gathered)
        outputs = []
        indices = (context.rank, 2 * context.size - 1 - context.rank)
        for run, index in zip(query.chunk(2), indices, strict=True):
            end = (index + 1) * len(run)
            run_mask = None
            if mask is not None:
                run_mask = _first_keys(mask, end)
            keys = gathered[:end, 0]
            values = gathered[:end, 1, ..., :width]
            outputs.append(attend(run, keys, values, run_mask, kind, bias))
        return torch.cat(outputs)

    @override
    def _alibi_of(self, q: Tensor) -> Alibi | None:
        alibi = super()._alibi_of(q)
        context = ContextParallel(self.config)
        if alibi is None or not context.exchanges_heads:
            return alibi
        number = self.tp_rank * context.size + context.rank
        return replace(alibi, first_head=number * alibi.num_local_heads)

    @override
    def _own_sinks(self, sinks: Tensor) -> Tensor:
        return ContextParallel(self.config).own_heads(sinks, 0)


def use_peer_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Let attention exchange heads by peer copies where the GPUs support it; collective over the cp group."""
    collectives = peer_copies.create_peer_copies(parallel_state.get_context_parallel_group())
    for module in torch.nn.ModuleList(chunks).modules():
        if isinstance(module, ContextParallelAttention):
            module.collectives = collectives


def _first_keys(mask: Tensor, end: int) -> Tensor:
    """Mask of the first ``end`` keys, [b, end]: one tensor for all layers, which share what is derived from it."""

    def make(own: Tensor) -> Tensor:
        return own[:, :end].contiguous()

    return MASK_CACHE.get(mask, ("first keys", end), make)


def _rotate_own_last(
    context: ContextParallel,
    gathered: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate keys that were gathered rank by rank, and their mask, so that this rank's come last, like its queries.

    Only for attention that depends on the segments of keys, not on their positions.
    """
    after = context.rank + 1
    rotated = gathered.roll(-after * (len(gathered) // context.size), 0)
    if mask is None:
        return rotated, None
    if mask.dim() == 4 and mask.shape[2] > 1:
        mask = context.own_tokens(mask, 2)
    ranks = [(after + i) % context.size for i in range(context.size)]

    def make(own: Tensor) -> Tensor:
        return torch.cat([context.own_tokens(own, -1, rank) for rank in ranks], -1)

    return rotated, MASK_CACHE.get(mask, "own last", make)


class _GatherKeys(torch.autograd.Function):
    """All-gather [s/cp, ...] rank by rank into [s, ...]; gradients are reduce-scattered in float32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = own.new_empty(group.size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        full = gradient.float().contiguous()
        own = full.new_empty(len(full) // ctx.group.size(), *full.shape[1:])
        dist.reduce_scatter_tensor(own, full, group=ctx.group)
        return own.to(gradient.dtype), None
