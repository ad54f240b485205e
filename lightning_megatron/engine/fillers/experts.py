"""Mixture of experts without Transformer Engine: router, load balancing, token dispatchers and grouped experts.

They replace parts of megatron-core 0.16.1's ``MoELayer``. Its own router multiplies the auxiliary loss by the tokens of
one tensor-parallel rank instead of all (its gradient is wrong by a factor of tp), and expects another normalization
than by the targets of the global batch; its ``SequentialMLP`` launches two GEMMs for each expert, its ``GroupedMLP``
needs another package.

**The auxiliary loss** is that of Fedus et al. 2021 (arXiv 2101.03961, eq. 4-6) as transformers writes it: E * sum_e f_e
P_e, with f_e the assignments of expert e per token and P_e the mean probability of e, over the non-padding tokens of a
microbatch. It is averaged over microbatches, weighted by their tokens, and over layers, and multiplied by the model's
coefficient. Each layer is balanced separately, as in Megatron-LM, because the f and P of other pipeline stages are not
available in time; transformers 5.23 averages f and P over the layers first, which is the same for one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.fillers.kernels import RecomputedOutput, recomputes_cheap_outputs

# ---- router ---------------------------------------------------------------------------------------------------------


class Router(TopKRouter):
    """Top-k router in fp32: softmax over all experts; Megatron's parameter ``weight``, [experts, h].

    With ``moe_router_enable_expert_bias`` the scores are sigmoids, and experts are selected by the sum of score and
    ``expert_bias``, [experts], fp32, which is updated each step by the load of the experts (Wang et al. 2024, arXiv
    2408.15664).

    Attributes:
        num_tokens: [], fp32: non-padding tokens of the global batch; None outside of a training step.
        load: [1 + experts], fp32, of the step: this rank's part of the auxiliary loss, coefficient included, and the
            number of tokens of this replica that were assigned to each expert.
    """

    load: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of Megatron-Core's own router, of which 0.19 has more."""
        super().__init__(*args, **kwargs)
        frequency = self.config.moe_layer_freq
        self._num_layers = sum(frequency) if isinstance(frequency, list) else self.config.num_layers
        self.num_tokens: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Select the experts of each token.

        Args:
            logits: [s or s/tp, b, experts], fp32.
            padding_mask: [s or s/tp, b], bool, True for padding; None for no padding.

        Returns:
            Probabilities, fp32, by which the outputs of the experts are multiplied, and expert indices, int64: each
            [tokens, topk].
        """
        logits = logits.view(-1, logits.shape[-1]).float()
        if self.expert_bias is None:
            scores = torch.softmax(logits, dim=-1)
            probs, experts = torch.topk(scores, self.topk, dim=-1)
        else:
            scores = torch.sigmoid(logits)
            experts = torch.topk(scores + self.expert_bias, self.topk, dim=-1).indices
            probs = scores.gather(1, experts)
            scores = scores / scores.sum(
                dim=-1, keepdim=True
            )  # for the auxiliary loss, as in Megatron
        if not self.config.moe_router_pre_softmax:
            probs = probs / probs.sum(dim=-1, keepdim=True)
        if self.training and torch.is_grad_enabled() and self.num_tokens is not None:
            probs = self._attach_aux_loss(probs, scores, experts, padding_mask)
        return probs, experts

    def _attach_aux_loss(
        self, probs: Tensor, scores: Tensor, experts: Tensor, padding_mask: Tensor | None
    ) -> Tensor:
        """Return ``probs`` with the backward pass of the auxiliary loss attached."""
        assert self.num_tokens is not None
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
        if padding_mask is not None:
            is_token = ~padding_mask.reshape(-1, 1)
            routing_map, scores = routing_map & is_token, scores * is_token
        counts = routing_map.sum(dim=0).float()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        share = counts * self.topk / counts.sum().clamp(min=1.0)
        factor = self.config.moe_aux_loss_coeff * self.config.num_moe_experts / self._num_layers
        loss = factor * (share * scores.sum(dim=0)).sum() / self.num_tokens
        self.load[0] += loss.detach()
        if self.tp_cp_group.rank() == 0:
            self.load[1:] += counts
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return attached


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Load of the experts in one training step; the same on every rank, on the device."""

    loss: Tensor
    """[], fp32: the auxiliary loss as added to the training loss."""
    counts: Tensor
    """[layers, experts], fp32: tokens of the global batch that were assigned to each; 0 in layers without experts."""

    @property
    def max_load(self) -> Tensor:
        """[]: the largest load of an expert, relative to the mean of its layer; 1 is perfect balance."""
        return self._relative_loads.amax()

    @property
    def min_load(self) -> Tensor:
        """[]: the smallest relative load of an expert; 0 if an expert learns nothing."""
        return torch.where(
            self.counts.sum(dim=1, keepdim=True) > 0, self._relative_loads, torch.inf
        ).amin()

    @property
    def _relative_loads(self) -> Tensor:
        return self.counts / self.counts.mean(dim=1, keepdim=True).clamp(min=1e-9)


class LoadBalance:
    """Measures and balances the load of the experts in this rank's model chunks."""

    def __init__(self, config: TransformerConfig, chunks: Iterable[torch.nn.Module]) -> None:
        self._shape = (config.num_layers, 1 + config.num_moe_experts)
        self._bias_rate = config.moe_router_bias_update_rate
        self._routers = [
            module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)
        ]

    def begin(self, tokens: Tensor) -> None:
        """Begin a step with ``tokens``, [], fp32: the number of non-padding tokens over all ranks."""
        for router in self._routers:
            router.num_tokens, router.load = tokens.clamp(min=1.0), tokens.new_zeros(self._shape[1])

    def end(self, device: torch.device) -> LoadReport:
        """End the step: all-reduce the loads and update the expert biases; collective over the world."""
        loads = torch.zeros(self._shape, device=device)
        for router in self._routers:
            loads[router.layer_number - 1], router.num_tokens = router.load, None
        dist.all_reduce(loads)
        counts = loads[:, 1:]
        for router in self._routers:
            if router.expert_bias is not None:
                # Megatron's own update adds 0: its counts, in bf16 for a bf16 model, are not set by this router.
                load = counts[router.layer_number - 1]
                router.expert_bias += self._bias_rate * (load.mean() - load).sign()
        return LoadReport(loss=loads[:, 0].sum(), counts=counts)


# ---- token dispatchers -----------------------------------------------------------------------------------------------
# Megatron's MoEAlltoAllTokenDispatcher sends a token once for each of its experts, synchronizes the host with the GPU
# three times per layer even at ep=1, copies all tokens in chunks per expert, and sums outputs by atomic additions in
# bf16, whose order differs between runs. Here:
#
# - A token is sent to a rank once, however many of its experts are there, with their indices and probabilities; the
#   outputs of these experts are summed there. With 8 experts over 2 (4) ranks that is a fourth (0.45) of the rows.
# - The host synchronizes once per layer, for the message sizes that NCCL needs, and not at all at ep=1.
# - With recompute="selective" the input rows of experts, topk times the tokens, are gathered again in the backward pass
#   instead of being kept: 32 of 140 kB per token and layer of Qwen3-30B-A3B.
# - Sums are computed in a fixed order, in fp32, and rounded once: runs are reproducible.


class Permutation(NamedTuple):
    """Rows sorted by destination; a row with several destinations is repeated, once for each."""

    rows: Tensor
    """[sorted], int64: index of the source row at each position."""
    assignments: Tensor
    """[sorted], int64: index of the assignment at each position, among all [n * k]."""
    positions: Tensor
    """[n, k], int64: position of each assignment; the number of positions for those without a destination."""
    ends: Tensor
    """[destinations], int32: end of each destination's positions."""


def sort_rows(destinations: Tensor, count: int, total: int) -> Permutation:
    """Sort rows by their destinations, without host synchronization.

    Args:
        destinations: [n, k]: from 0; ``count`` or more for none.
        count: Number of destinations.
        total: Number of elements of ``destinations`` that are less than ``count``.
    """
    keys, order = destinations.flatten().to(torch.int16).sort(stable=True)
    indices = torch.arange(len(order), device=order.device)
    positions = torch.empty_like(order).scatter_(0, order, indices).clamp_(max=total)
    destination = torch.arange(count, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, destination, right=True, out_int32=True)
    assignments = order[:total]
    return Permutation(
        assignments // destinations.shape[1], assignments, positions.view_as(destinations), ends
    )


def _sum_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Sum the rows of ``x``, [m, h], at ``positions``, [n, k], in fp32: [n, h]; position m stands for no row."""
    if x.is_cuda:
        from lightning_megatron.engine.fillers.triton_kernels import (
            row_sums,
        )  # Triton is on GPUs only

        return row_sums(x, positions)
    padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return (
        padded[positions].sum(dim=1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    )


class _Permute(torch.autograd.Function):
    """Permute rows, or sum them back (``inverse``); each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Permutation, inverse: bool) -> Tensor:
        ctx.order, ctx.inverse = order, inverse
        return _sum_rows(x, order.positions) if inverse else x.index_select(0, order.rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), order = upstream, ctx.order
        return (
            gradient.index_select(0, order.rows)
            if ctx.inverse
            else _sum_rows(gradient, order.positions),
            None,
            None,
        )


def permute(x: Tensor, order: Permutation) -> Tensor:
    """Rows of ``x``, [n, h], in the order of their destinations: [sorted, h]."""
    rows: Tensor = _Permute.apply(x, order, False)  # type: ignore[no-untyped-call]
    return rows


def unpermute(x: Tensor, order: Permutation) -> Tensor:
    """Sum of each row's results, [n, h] of ``x`` [sorted, h]; in fp32, rounded once."""
    sums: Tensor = _Permute.apply(x, order, True)  # type: ignore[no-untyped-call]
    return sums


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
        self._num_local, self._first, self._permuted = (
            num_local_experts,
            local_expert_indices[0],
            RecomputedOutput(),
        )

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
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
        self._shape, self._experts, self._num_assignments = (
            tokens.shape,
            routing_map,
            routing_map.numel(),
        )
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows and probabilities to the ranks of their experts; collective over the ep group."""
        return tokens, probs

    def _select_local(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and local expert indices of received rows, [rows, topk] each.

        Experts of other ranks have the index ``_num_local``.
        """
        return probs, self._experts

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by expert; returns the arguments of ``GroupedExperts``."""
        probs, experts = self._select_local(probs)
        self._to_experts = order = sort_rows(experts, self._num_local, self._num_assignments)
        is_kept = not recomputes_cheap_outputs(self.config)
        rows = (
            permute(tokens, order) if is_kept else self._permuted.checkpoint(permute, tokens, order)
        )
        return rows, order.ends, probs.flatten().gather(0, order.assignments)

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
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher``; rows are sorted by rank."""
        tokens, _ = super().dispatch_preprocess(tokens, routing_map, probs)
        is_on_rank = (routing_map // self._num_local)[:, :, None] == self._ranks
        is_sent = is_on_rank.any(dim=1)
        counts = torch.stack((is_sent.sum(dim=0), is_on_rank.sum(dim=(0, 1))), dim=1)
        # For each destination rank (rows, assignments to its experts), and last the number of this rank's tokens.
        counts = F.pad(counts, (0, 0, 0, 1), value=len(tokens))
        all_counts = counts.new_empty(self.ep_size * len(counts), 2)
        dist.all_gather_into_tensor(all_counts, counts, group=self.ep_group)
        all_counts = all_counts.view(self.ep_size, *counts.shape)
        sent, received = all_counts[self.ep_group.rank()], all_counts[:, self.ep_group.rank()]
        to_ranks, from_ranks, token_counts = torch.stack(
            (sent[:-1], received, all_counts[:, -1])
        ).tolist()
        self._splits = [rows for rows, _ in to_ranks], [rows for rows, _ in from_ranks]
        self._num_assignments = sum(assignments for _, assignments in from_ranks)
        metadata = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        return self._prepare_rows(
            tokens, metadata, is_sent, max(count for count, _ in token_counts)
        )

    def _prepare_rows(
        self, rows: Tensor, metadata: Tensor, is_sent: Tensor, max_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Rows and metadata in the order in which they are sent.

        Args:
            rows: [n, h].
            metadata: [n, 2 * topk]: probabilities and expert indices.
            is_sent: [n, ep], bool: the destination ranks of each row.
            max_rows: Largest n of the group's ranks.
        """
        self._to_ranks = sort_rows(
            self._ranks.where(is_sent, self.ep_size), self.ep_size, sum(self._splits[0])
        )
        return permute(rows, self._to_ranks), permute(metadata, self._to_ranks)

    def _select_local(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        probs, indices = probs.chunk(2, dim=1)
        experts = indices.detach() - self._first
        return probs, experts.where((experts >= 0) & (experts < self._num_local), self._num_local)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Dispatcher``."""
        sent, received = self._splits
        tokens, probs = (all_to_all(self.ep_group, x, received, sent) for x in (tokens, probs))
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """See ``Dispatcher``."""
        sent, received = self._splits
        back: Tensor = all_to_all(self.ep_group, outputs, sent, received)
        return back

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """See ``Dispatcher``."""
        return unpermute(outputs, self._to_ranks).view(self._shape)


class AllGatherDispatcher(AllToAllDispatcher):
    """All-gathers the rows of the ep group, and reduce-scatters the outputs of the experts.

    Replaces ``MoEAllGatherTokenDispatcher``, which needs the same number of rows on all ranks: here ranks with fewer
    are padded with rows without experts.

    It moves (ep - 1) / ep of all ranks' rows in either direction, however few a rank needs: as much as all-to-all if
    tokens have at least as many experts as there are ranks, more if they have fewer.
    """

    def _prepare_rows(
        self, rows: Tensor, metadata: Tensor, is_sent: Tensor, max_rows: int
    ) -> tuple[Tensor, Tensor]:
        padding = (0, 0, 0, max_rows - len(rows))
        return F.pad(rows, padding), F.pad(metadata, padding, value=-1.0)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather both over the ep group: [ep * rows, h] and [ep * rows, 2 * topk]."""
        tokens, probs = (
            gather_from_sequence_parallel_region(x, group=self.ep_group) for x in (tokens, probs)
        )
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Reduce-scatter over the ep group: the sums of all experts' outputs for this rank's rows, [rows, h]."""
        sums: Tensor = reduce_scatter_to_sequence_parallel_region(outputs, group=self.ep_group)
        return sums

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Remove the padding rows, [s or s/tp, b, h]."""
        return outputs[: self._shape[:-1].numel()].view(self._shape)


def dispatcher(kind: type[Dispatcher]) -> Callable[..., Dispatcher]:
    """Factory of ``kind``, or of ``Dispatcher`` at ep=1."""

    def make(
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: ProcessGroupCollection,
    ) -> Dispatcher:
        constructor = kind if pg_collection.ep.size() > 1 else Dispatcher
        return constructor(num_local_experts, local_expert_indices, config, pg_collection)

    return make


# ---- experts --------------------------------------------------------------------------------------------------------


class GroupedExperts(MegatronModule):
    """MLPs of this rank's experts, as two grouped GEMMs (``torch.nn.functional.grouped_mm``).

    Parameters ``linear_fc1`` [experts/ep, (2 *) ffn, h] and ``linear_fc2`` [experts/ep, h, ffn]; their gradients are
    reduced over Megatron's expert-data-parallel group, which includes tensor-parallel ranks. Checkpoints have separate
    matrices per expert, with the names of Megatron's ``SequentialMLP``, so that they load at any ep.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Create the weights; takes the arguments of Megatron's ``SequentialMLP``, ``name`` from 0.19 on."""
        del name
        super().__init__(config=config)
        assert pg_collection is not None
        self._ep, self._dp = pg_collection.ep, pg_collection.expt_dp
        width, hidden, count = config.moe_ffn_hidden_size, config.hidden_size, num_local_experts
        self.linear_fc1 = self._create_weight(
            count, (2 if config.gated_linear_unit else 1) * width, hidden
        )
        self.linear_fc2 = self._create_weight(count, hidden, width)

    def _create_weight(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(
            torch.empty(*shape, dtype=self.config.params_dtype, device=device)
        )
        # Also at ep=1, so that the optimizer's parameter groups are the same at any ep.
        weight.allreduce = False  # type: ignore[attr-defined]
        # For the gradient norm: megatron-core 0.16.1, optimizer/optimizer.py, counts parameters that are not tensor
        # parallel on the first tp rank only, and would miss the experts (or optimizer shards) of the others.
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        return weight

    def forward(self, tokens: Tensor, ends: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run each token through its expert.

        Args:
            tokens: [n, h], sorted by expert.
            ends: [experts/ep], int32, on the device: end of each expert's tokens.
            probs: [n], fp32: factors of the outputs.

        Returns:
            Outputs, [n, h], and no bias.
        """
        activated = RecomputedOutput()
        hidden = activated.checkpoint(
            self._activation, _grouped_matmul(tokens, self.linear_fc1, ends), probs
        )
        output = _grouped_matmul(hidden, self.linear_fc2, ends)
        if recomputes_cheap_outputs(self.config):
            activated.discard_output_and_register_recompute(output)
        return output, None

    def _activation(self, hidden: Tensor, probs: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:  # SwiGLU on a GPU
            fused: Tensor = weighted_bias_swiglu_impl(hidden, None, probs[:, None])
            return fused
        if self.config.gated_linear_unit:
            gate, up = hidden.chunk(2, dim=-1)
            activated: Tensor = self.config.activation_func(gate) * up
        else:
            activated = self.config.activation_func(hidden)
        return (activated * probs[:, None]).to(hidden.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One entry per matrix of each expert, as for ``SequentialMLP``."""
        build, replica = partial(self._shards, sharded_offsets), (0, 0, self._dp.rank())
        return {
            prefix + name: ShardedTensorFactory(
                f"{prefix}experts.{name}.weight", weight, build, torch.stack, replica
            )
            for name, weight in self.named_parameters()
        }

    @torch.no_grad()
    def _shards(
        self, offsets: Any, key: str, weight: Tensor, replica: Any, flattened: Any
    ) -> list[ShardedTensor]:
        axes, count = len(offsets), len(weight)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                expert,
                *offsets,
                (axes, self._ep.rank() * count + index, self._ep.size() * count),
                replica_id=replica,
                prepend_axis_num=axes + 1,
            )
            for index, expert in enumerate(weight)
        ]


class _GroupedMatmul(torch.autograd.Function):
    """Each token times the transposed matrix of its expert; weight gradients are added to ``main_grad`` directly.

    Autograd's own weight gradients are transposed, so that adding them to the buffer reads memory out of order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.weights = weights
        products: Tensor = F.grouped_mm(tokens, weights.transpose(1, 2), offs=ends)
        return products

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, ends = ctx.saved_tensors
        gradient, weights = upstream[0].contiguous(), ctx.weights
        d_tokens = F.grouped_mm(gradient, weights, offs=ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_tokens, None, None
        d_weights = F.grouped_mm(gradient.t(), tokens, offs=ends)
        if hasattr(weights, "main_grad"):
            if d_weights.is_cuda:
                from lightning_megatron.engine.fillers.triton_kernels import (
                    add_to,
                )  # Triton is on GPUs only

                add_to(weights.main_grad, d_weights)
            else:
                weights.main_grad.add_(d_weights)
            weights.grad_added_to_main_grad = (
                True  # Megatron's hook requires a gradient, and then ignores it
            )
        return d_tokens, d_weights, None


def _grouped_matmul(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Product of each token and the transposed matrix of its expert, [n, rows of a matrix]."""
    if (
        len(tokens) == 0
    ):  # none of this rank's experts was selected; their gradient is 0 all the same
        return tokens @ weights[0].t()
    products: Tensor = _GroupedMatmul.apply(tokens, weights, ends)  # type: ignore[no-untyped-call]
    return products
