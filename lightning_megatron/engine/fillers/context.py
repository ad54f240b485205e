"""Context parallelism: each sequence split over the cp group, and the attention that sees all of it.

Outside of attention a token's states depend on that token alone, so a rank computes only those of its own tokens. A
model's chunks take whole rows and give whole rows back: masks, labels, losses and metrics know nothing of the split,
and every cp rank has the same loss (Megatron-Core splits the batch instead, and leaves it to whoever writes a loss to
add it up). What travels for that, one loss per token, is nothing beside what attention exchanges, in one of two ways:

- ``a2a`` (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509): heads for tokens. Each rank attends with its share
  of the heads over whole rows in their order, so documents, windows, ALiBi, biases and dropout are as on one rank and
  the same kernels serve. Two all-to-alls a layer, forward and backward, of what a rank has; GPUs of one host copy into
  each other's memory instead (``peer_copies.py``). Ranks own a run of tokens.
- ``all_gather`` (Llama 3, arXiv 2407.21783, section 3.3.2) where there are too few key/value heads for that: each rank
  attends with its queries to the keys and values of all. Ranks own two runs of tokens, the r-th from the beginning and
  the r-th from the end (zigzag), for causal attention gives late tokens more to do. Attention to the keys up to a run
  is causal attention of the last queries to all, which ``SDPAttention`` computes with cached keys, too. Gradients of
  keys and values are added in float32.

Exchanging keys and values in a ring, Megatron's ``p2p``, needs the softmax's denominators of each part, which torch's
kernels keep to themselves where there is a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.fillers import peer_copies
from lightning_megatron.engine.fillers.attention import CAUSAL, PER_MASK, SDPAttention
from lightning_megatron.engine.fillers.masks import Alibi
from lightning_megatron.engine.fillers.peer_copies import Collectives


@dataclass(frozen=True)
class ContextParallel:
    """Which tokens of a row a rank of the cp group owns; all of them at cp=1, and while text is generated."""

    config: TransformerConfig
    """Of the model: its ``context_parallel_size`` and ``cp_comm_type`` count, at the moment of a call."""

    @property
    def size(self) -> int:
        """Ranks that share a row."""
        size: int = self.config.context_parallel_size
        return size

    @property
    def group(self) -> dist.ProcessGroup:
        """These ranks."""
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.group.rank()

    @property
    def exchanges_heads(self) -> bool:
        """Whether a rank attends with some heads over whole rows (``a2a``)."""
        return self.size > 1 and self.config.cp_comm_type == "a2a"

    def own_heads(self, of_all: Tensor, dim: int) -> Tensor:
        """Of something that each head has, what is of the heads that this rank attends with."""
        return of_all.chunk(self.size, dim)[self.rank] if self.exchanges_heads else of_all

    def own_queries(self, of_all: Tensor, dim: int) -> Tensor:
        """Of something that each query has, what is of the queries that this rank attends with."""
        return of_all if self.exchanges_heads else self.own_tokens(of_all, dim)

    def own_tokens(self, whole: Tensor, dim: int = 1, rank: int | None = None) -> Tensor:
        """What is of this rank's tokens (or another's), in their order.

        Args:
            whole: As long along ``dim`` as the row; 2 x cp divides it.
            dim: Of the tokens.
            rank: Another one of the group.
        """
        n = self.size
        if n == 1:
            return whole
        r = self.rank if rank is None else rank
        if self.exchanges_heads:
            return whole.chunk(n, dim)[r]
        runs = whole.chunk(2 * n, dim)
        return torch.cat((runs[r], runs[2 * n - 1 - r]), dim)

    def gather_tokens(self, own: Tensor, dim: int = 1) -> Tensor:
        """The opposite of ``own_tokens``; every rank of the group must call.

        All ranks compute the same with it, so the gradient of a rank's part is in each of them: it is taken, not added.

        Args:
            own: This rank's part.
            dim: Of the tokens.
        """
        if self.size == 1:
            return own
        first = own.transpose(0, dim).contiguous()
        gathered = gather_from_sequence_parallel_region(first, tensor_parallel_output_grad=False, group=self.group)
        return self.restore_order(gathered).transpose(0, dim).contiguous()

    def broadcast_first_token(self, found: Tensor) -> Tensor:
        """What was computed from the row's first token, on all ranks; theirs, from their own first token, is dropped.

        Args:
            found: Of the same shape on all ranks of the group, which must all call.
        """
        return found if self.size == 1 else self.gather_tokens(found[None], 0)[0]

    def restore_order(self, gathered: Tensor) -> Tensor:
        """Tokens of rank 0, of rank 1, ... in the order of the row; along the first axis."""
        n = self.size
        if self.exchanges_heads:
            return gathered
        runs = gathered.chunk(2 * n)
        # Rank r owns the runs r and 2n - 1 - r.
        return torch.cat([*runs[::2], *runs[:0:-2]])


class ContextParallelAttention(SDPAttention):
    """``SDPAttention`` of queries, keys and values of the tokens that this rank of the cp group owns."""

    exchange: Collectives | None = None
    """By which heads are exchanged for tokens; None for NCCL or gloo."""

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
        """Weighted sums of the values, [sq/cp, b, np * hn]; every rank of the cp group must call.

        Args:
            query: [sq/cp, b, np, hn].
            key: [sk/cp, b, ng, hn]; ng divides np.
            value: [sk/cp, b, ng, hn].
            attention_mask: Of the whole rows, as ``SDPAttention`` takes it; with causal attention [b, sk].
            attn_mask_type: What is hidden besides.
            attention_bias: Of the heads and queries that this rank attends with (``own_heads``, ``own_queries``) and
                all keys.
            packed_seq_params: Unused.
        """
        context, attend, mask, bias = ContextParallel(self.config), super().forward, attention_mask, attention_bias
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if context.size == 1:
            return attend(query, key, value, mask, kind, bias)
        if context.exchanges_heads:
            exchange = self.exchange or Collectives(context.group)
            together = ((query,), (key, value)) if self.is_cross else ((query, key, value),)
            query, key, value = (x for each in together for x in exchange.all_to_all(*each, split_dim=2, concat_dim=0))
            return exchange.all_to_all(attend(query, key, value, mask, kind, bias), split_dim=0, concat_dim=2)[0]
        gathered: Tensor = _GatheredKeys.apply(torch.stack((key, value), dim=1), context.group)  # type: ignore[no-untyped-call]
        if kind not in CAUSAL:
            if not self.is_cross and bias is None:
                gathered, mask = _own_last(context, gathered, mask)
            else:
                gathered = context.restore_order(gathered)
            return attend(query, gathered[:, 0], gathered[:, 1], mask, kind, bias)
        gathered, outputs = context.restore_order(gathered), []
        for run, number in zip(query.chunk(2), (context.rank, 2 * context.size - 1 - context.rank), strict=True):
            end = (number + 1) * len(run)
            seen = None if mask is None else _first_keys(mask, end)
            outputs.append(attend(run, gathered[:end, 0], gathered[:end, 1], seen, kind, bias))
        return torch.cat(outputs)

    @override
    def _alibi_of(self, q: Tensor) -> Alibi | None:
        alibi, context = super()._alibi_of(q), ContextParallel(self.config)
        if alibi is None or not context.exchanges_heads:
            return alibi
        return replace(alibi, first_head=(self.tp_rank * context.size + context.rank) * alibi.num_local_heads)


def use_peer_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Let attention exchange heads by copies, if the ranks of the cp group can; every rank must call."""
    attentions = [m for chunk in chunks for m in chunk.modules() if isinstance(m, ContextParallelAttention)]
    exchange = peer_copies.create_peer_copies(parallel_state.get_context_parallel_group())
    for attention in attentions:
        attention.exchange = exchange


def _first_keys(mask: Tensor, end: int) -> Tensor:
    """[b, end]: one tensor for all layers, for which they then share what they make of it."""
    first: Tensor = PER_MASK.get(mask, ("first keys", end), lambda own: own[:, :end].contiguous())
    return first


def _own_last(context: ContextParallel, gathered: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Keys of rank 0, of rank 1, ... and their mask, turned so that this rank's come last, as its queries' places are.

    Where nothing depends on a key's place but whether its segment is the query's.
    """
    after = context.rank + 1
    turned = gathered.roll(-after * (len(gathered) // context.size), 0)
    if mask is None:
        return turned, None
    if mask.dim() == 4 and mask.shape[2] > 1:
        mask = context.own_tokens(mask, 2)
    ranks = [(after + i) % context.size for i in range(context.size)]
    keys = PER_MASK.get(mask, "own last", lambda own: torch.cat([context.own_tokens(own, -1, r) for r in ranks], -1))
    return turned, keys


class _GatheredKeys(torch.autograd.Function):
    """All ranks' [s/cp, ...], one after the other: [s, ...]; gradients are reduce-scattered in float32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = own.new_empty(group.size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        whole = gradient.float().contiguous()
        own = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=ctx.group)
        return own.to(gradient.dtype), None
