"""Mixture of experts without Transformer Engine: the router, the ranks' exchange of tokens, the experts, their load.

They stand in the slots of megatron-core 0.16.1's ``MoELayer``. Its own router multiplies the auxiliary loss by the
tokens of one tensor-parallel rank instead of all (its gradient is wrong by a factor of tp), and means another division
than that by the targets of the global batch; its ``SequentialMLP`` launches two products for each expert, its
``GroupedMLP`` needs another package.

**The auxiliary loss** is that of Fedus et al. 2021 (arXiv 2101.03961, eq. 4-6) as transformers writes it: E * sum_e f_e
P_e, with f_e the assignments of expert e per token and P_e the mean probability of e, over the tokens of a microbatch
that are no padding. It is the mean over microbatches, weighed by their tokens, and over layers, times the model's
coefficient. Each layer is balanced by itself, as in Megatron-LM, because the layers of a pipeline do not know of each
other in time; transformers 5.23 averages f and P over the layers first, which is the same for one layer.
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

# ---- the router -----------------------------------------------------------------------------------------------------


class Router(TopKRouter):
    """Softmax over all experts, the best ``topk`` of them, in fp32; Megatron's parameter ``weight``, [experts, h].

    With ``moe_router_enable_expert_bias`` the scores are sigmoids, and the best are those with the largest sum of score
    and ``expert_bias``, [experts], fp32, which follows the load of the experts from step to step (Wang et al. 2024,
    arXiv 2408.15664).

    Attributes:
        tokens: [], fp32: tokens of the whole batch, without padding; None outside a step of training.
        load: [1 + experts], fp32, of the step: this rank's part of the auxiliary loss, coefficient included, and how
            many tokens of this rank's copy of the model went to each expert.
    """

    load: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what Megatron-Core passes to its own router, of which 0.19 has more."""
        super().__init__(*args, **kwargs)
        frequency = self.config.moe_layer_freq
        self._num_layers = sum(frequency) if isinstance(frequency, list) else self.config.num_layers
        self.tokens: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [s or s/tp, b, experts], fp32.
            padding_mask: [s or s/tp, b], bool: which tokens are padding; None for none.

        Returns:
            [tokens, topk] each: what the outputs of the experts are multiplied by, fp32; and which these are, int64.
        """
        logits = logits.view(-1, logits.shape[-1]).float()
        if self.expert_bias is None:
            scores = torch.softmax(logits, dim=-1)
            best, chosen = torch.topk(scores, self.topk, dim=-1)
        else:
            scores = torch.sigmoid(logits)
            chosen = torch.topk(scores + self.expert_bias, self.topk, dim=-1).indices
            best = scores.gather(1, chosen)
            scores = scores / scores.sum(dim=-1, keepdim=True)  # for the auxiliary loss, as in Megatron
        if not self.config.moe_router_pre_softmax:
            best = best / best.sum(dim=-1, keepdim=True)
        if self.training and torch.is_grad_enabled() and self.tokens is not None:
            best = self._balanced(best, scores, chosen, padding_mask)
        return best, chosen

    def _balanced(self, probs: Tensor, scores: Tensor, chosen: Tensor, padding_mask: Tensor | None) -> Tensor:
        """``probs``, to whose backward pass that of the auxiliary loss is attached."""
        assert self.tokens is not None
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        if padding_mask is not None:
            is_token = ~padding_mask.reshape(-1, 1)
            routing_map, scores = routing_map & is_token, scores * is_token
        counts = routing_map.sum(dim=0).float()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        share = counts * self.topk / counts.sum().clamp(min=1.0)
        factor = self.config.moe_aux_loss_coeff * self.config.num_moe_experts / self._num_layers
        loss = factor * (share * scores.sum(dim=0)).sum() / self.tokens
        self.load[0] += loss.detach()
        if self.tp_cp_group.rank() == 0:
            self.load[1:] += counts
        balanced: Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return balanced


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How one step of training loaded the experts; the same on every rank, on the device."""

    loss: Tensor
    """[], fp32: the auxiliary loss as it is part of the training loss."""
    counts: Tensor
    """[layers, experts], fp32: tokens of the global batch that went to each; 0 in layers without experts."""

    @property
    def max_load(self) -> Tensor:
        """[]: the largest number of tokens of an expert, divided by the mean of its layer; 1 is perfect balance."""
        return self._of_mean.amax()

    @property
    def min_load(self) -> Tensor:
        """[]: the smallest, likewise; 0 where an expert learns nothing."""
        return torch.where(self.counts.sum(dim=1, keepdim=True) > 0, self._of_mean, torch.inf).amin()

    @property
    def _of_mean(self) -> Tensor:
        return self.counts / self.counts.mean(dim=1, keepdim=True).clamp(min=1e-9)


class LoadBalance:
    """The routers of this rank's chunks during one step."""

    def __init__(self, config: TransformerConfig, chunks: Iterable[torch.nn.Module]) -> None:
        self._shape = (config.num_layers, 1 + config.num_moe_experts)
        self._bias_rate = config.moe_router_bias_update_rate
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]

    def begin(self, tokens: Tensor) -> None:
        """Start a step of so many tokens, [], fp32, over all ranks and without padding."""
        for router in self._routers:
            router.tokens, router.load = tokens.clamp(min=1.0), tokens.new_zeros(self._shape[1])

    def end(self, device: torch.device) -> LoadReport:
        """What became of it: one all-reduce over all ranks, which must all call."""
        loads = torch.zeros(self._shape, device=device)
        for router in self._routers:
            loads[router.layer_number - 1], router.tokens = router.load, None
        dist.all_reduce(loads)
        counts = loads[:, 1:]
        for router in self._routers:
            if router.expert_bias is not None:
                # Megatron's own update adds 0: it reads counts that a bf16 model keeps in bf16, and the router leaves.
                of_layer = counts[router.layer_number - 1]
                router.expert_bias += self._bias_rate * (of_layer.mean() - of_layer).sign()
        return LoadReport(loss=loads[:, 0].sum(), counts=counts)


# ---- the ranks' exchange of tokens -----------------------------------------------------------------------------------
# Megatron's MoEAlltoAllTokenDispatcher sends a token once for each of its experts, lets the host wait for the GPU three
# times a layer at ep=1 too, copies all tokens in pieces of each expert, and adds outputs up by atomic additions in
# bf16: in another order in each run.
#
# - A token goes to a rank once, however many of its experts are there, with their numbers and probabilities; what these
#   experts make of it is added up there. Of 8 experts spread over 2 (4) ranks that is a fourth (0.45) of the rows.
# - The host waits once a layer for the sizes of messages, which NCCL wants to know, and not at all at ep=1.
# - With recompute="selective" the rows of experts, topk times what comes in, are gathered again in the backward pass
#   instead of being kept: 32 of 140 kB a token and layer of Qwen3-30B-A3B.
# - Each sum is made of its few addends in a fixed order, in fp32, and rounded once: runs are reproducible.


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
    """What ``MoELayer`` calls around its experts, in this order; here all of them are on this rank (ep=1).

    It keeps what one pass through the layer needs.
    """

    _shape: torch.Size
    _chosen: Tensor
    _num_choices: int
    _to_experts: Places

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Take what Megatron passes to its own dispatchers."""
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_local, self._first, self._rows = num_local_experts, local_expert_indices[0], RecomputedOutput()

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Lay out what each rank gets.

        Args:
            tokens: [s or s/tp, b, h].
            routing_map: [n, topk], int64: the experts of each token, of which n = s * b.
            probs: [n, topk], fp32: what their outputs are multiplied by.

        Returns:
            Rows, [n, h], and ``probs``; with several ranks more rows, and with each the probabilities and the numbers
            of its experts, [rows, 2 * topk], fp32.
        """
        self._shape, self._chosen, self._num_choices = tokens.shape, routing_map, routing_map.numel()
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange both over the ep group."""
        return tokens, probs

    def _of_own_experts(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """What outputs are multiplied by, and which of this rank's experts made them, [rows, topk] each.

        Those of other ranks have the number behind the last.
        """
        return probs, self._chosen

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by expert: the arguments of ``GroupedExperts``."""
        probs, experts = self._of_own_experts(probs)
        self._to_experts = found = sorted_by(experts, self._num_local, self._num_choices)
        is_kept = not recomputes_cheap_outputs(self.config)
        rows = spread(tokens, found) if is_kept else self._rows.checkpoint(spread, tokens, found)
        return rows, found.ends, probs.flatten().gather(0, found.choices)

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """Add up what this rank's experts made of each token."""
        self._rows.discard_output_and_register_recompute(outputs)
        self._rows = RecomputedOutput()
        return collected(outputs, self._to_experts)

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Exchange the sums back."""
        return outputs

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Add up what the ranks sent, [s or s/tp, b, h]."""
        return outputs.view(self._shape)


class AllToAllDispatcher(Dispatcher):
    """Each rank of the ep group gets the rows that its experts want; stands for ``MoEAlltoAllTokenDispatcher``."""

    _to_ranks: Places
    _splits: tuple[list[int], list[int]]

    @cached_property
    def _ranks(self) -> Tensor:
        return torch.arange(self.ep_size, device=torch.cuda.current_device())

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Dispatcher``'s; the rows of the first rank first."""
        tokens, _ = super().dispatch_preprocess(tokens, routing_map, probs)
        of_ranks = (routing_map // self._num_local)[:, :, None] == self._ranks
        goes = of_ranks.any(dim=1)
        counts = torch.stack((goes.sum(dim=0), of_ranks.sum(dim=(0, 1))), dim=1)
        # Of each rank, for each rank: rows, choices of its experts, and at the end how many rows there are to send.
        told = F.pad(counts, (0, 0, 0, 1), value=len(tokens))
        of_all = told.new_empty(self.ep_size * len(told), 2)
        dist.all_gather_into_tensor(of_all, told, group=self.ep_group)
        of_all = of_all.view(self.ep_size, *told.shape)
        sent, received = of_all[self.ep_group.rank()], of_all[:, self.ep_group.rank()]
        of_sent, of_received, of_rows = torch.stack((sent[:-1], received, of_all[:, -1])).tolist()
        self._splits = [rows for rows, _ in of_sent], [rows for rows, _ in of_received]
        self._num_choices = sum(choices for _, choices in of_received)
        with_numbers = torch.cat((probs, routing_map.to(probs.dtype)), dim=1)
        return self._laid_out(tokens, with_numbers, goes, max(rows for rows, _ in of_rows))

    def _laid_out(self, tokens: Tensor, with_numbers: Tensor, goes: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """What is sent.

        Args:
            tokens: [n, h].
            with_numbers: [n, 2 * topk].
            goes: [n, ep], bool: to which ranks.
            most: Largest n of the group's ranks.
        """
        self._to_ranks = sorted_by(self._ranks.where(goes, self.ep_size), self.ep_size, sum(self._splits[0]))
        return spread(tokens, self._to_ranks), spread(with_numbers, self._to_ranks)

    def _of_own_experts(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        probs, numbers = probs.chunk(2, dim=1)
        experts = numbers.detach() - self._first
        return probs, experts.where((experts >= 0) & (experts < self._num_local), self._num_local)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Dispatcher``'s."""
        sent, received = self._splits
        tokens, probs = (all_to_all(self.ep_group, x, received, sent) for x in (tokens, probs))
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """As ``Dispatcher``'s."""
        sent, received = self._splits
        back: Tensor = all_to_all(self.ep_group, outputs, sent, received)
        return back

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """As ``Dispatcher``'s."""
        return collected(outputs, self._to_ranks).view(self._shape)


class AllGatherDispatcher(AllToAllDispatcher):
    """Each rank of the ep group gets the rows of all, and what its experts make of them is added up and scattered.

    Stands in the place of ``MoEAllGatherTokenDispatcher``, which needs as many rows on all ranks: here those with fewer
    add some that no expert wants.

    What travels is (ep - 1) / ep of all ranks' rows in either direction, however few a rank needs: as much as by
    all-to-all where tokens have at least as many experts as there are ranks, more where they have fewer.
    """

    def _laid_out(self, tokens: Tensor, with_numbers: Tensor, goes: Tensor, most: int) -> tuple[Tensor, Tensor]:
        added = (0, 0, 0, most - len(tokens))
        return F.pad(tokens, added), F.pad(with_numbers, added, value=-1.0)

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gather both over the ep group: [ep * rows, h] and [ep * rows, 2 * topk]."""
        tokens, probs = (gather_from_sequence_parallel_region(x, group=self.ep_group) for x in (tokens, probs))
        return tokens, probs

    def token_combine(self, outputs: Tensor) -> Tensor:
        """Add up what all ranks' experts made of this rank's rows, [rows, h]."""
        sums: Tensor = reduce_scatter_to_sequence_parallel_region(outputs, group=self.ep_group)
        return sums

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """Without the rows that were added, [s or s/tp, b, h]."""
        return outputs[: self._shape[:-1].numel()].view(self._shape)


def dispatcher(kind: type[Dispatcher]) -> Callable[..., Dispatcher]:
    """The constructor of ``kind`` where experts are on several ranks, of ``Dispatcher`` where they are not."""

    def make(
        num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: ProcessGroupCollection
    ) -> Dispatcher:
        chosen = kind if pg_collection.ep.size() > 1 else Dispatcher
        return chosen(num_local_experts, local_expert_indices, config, pg_collection)

    return make


# ---- the experts ----------------------------------------------------------------------------------------------------


class GroupedExperts(MegatronModule):
    """The MLPs of this rank's experts, all in two grouped products (``torch.nn.functional.grouped_mm``).

    Parameters ``linear_fc1`` [experts/ep, (2 *) ffn, h] and ``linear_fc2`` [experts/ep, h, ffn]; their gradients are
    reduced over Megatron's expert-data-parallel ranks, tensor-parallel ones among them. In checkpoints each expert has
    matrices of its own, with the names of Megatron's ``SequentialMLP``, so that they load at any ep.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Create the weights; arguments are those of Megatron's ``SequentialMLP``, ``name`` from 0.19 on."""
        del name
        super().__init__(config=config)
        assert pg_collection is not None
        self._ep, self._dp = pg_collection.ep, pg_collection.expt_dp
        width, hidden, count = config.moe_ffn_hidden_size, config.hidden_size, num_local_experts
        self.linear_fc1 = self._weight(count, (2 if config.gated_linear_unit else 1) * width, hidden)
        self.linear_fc2 = self._weight(count, hidden, width)

    def _weight(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        # Also at ep=1, so that the optimizer's groups are the same at any ep.
        weight.allreduce = False  # type: ignore[attr-defined]
        # For the gradient norm: megatron-core 0.16.1, optimizer/optimizer.py, counts what is not parallel on the first
        # tensor-parallel rank only, and misses the experts (or parts of the distributed optimizer) of the others.
        set_tensor_model_parallel_attributes(weight, True, 0, 1)
        return weight

    def forward(self, tokens: Tensor, ends: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run each token through its expert.

        Args:
            tokens: [n, h], those of the first expert first.
            ends: [experts/ep], int32, on the device: where the tokens of each end.
            probs: [n], fp32: what the outputs are multiplied by.

        Returns:
            [n, h]; and no bias.
        """
        activated = RecomputedOutput()
        hidden = activated.checkpoint(self._activation, _products(tokens, self.linear_fc1, ends), probs)
        output = _products(hidden, self.linear_fc2, ends)
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
        """One entry for each expert's matrix, as ``SequentialMLP`` has them."""
        build, replica = partial(self._shards, sharded_offsets), (0, 0, self._dp.rank())
        return {
            prefix + name: ShardedTensorFactory(f"{prefix}experts.{name}.weight", weight, build, torch.stack, replica)
            for name, weight in self.named_parameters()
        }

    @torch.no_grad()
    def _shards(self, before: Any, key: str, weight: Tensor, replica: Any, flattened: Any) -> list[ShardedTensor]:
        axes, count = len(before), len(weight)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                expert,
                *before,
                (axes, self._ep.rank() * count + number, self._ep.size() * count),
                replica_id=replica,
                prepend_axis_num=axes + 1,
            )
            for number, expert in enumerate(weight)
        ]


class _GroupedProduct(torch.autograd.Function):
    """Each token times the transposed matrix of its expert; weight gradients go straight to ``main_grad``.

    Autograd's own are transposed, and added to the buffer by a kernel that reads them against their order.
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
        of_tokens = F.grouped_mm(gradient, weights, offs=ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_tokens, None, None
        of_weights = F.grouped_mm(gradient.t(), tokens, offs=ends)
        if hasattr(weights, "main_grad"):
            if of_weights.is_cuda:
                from lightning_megatron.engine.fillers.triton_kernels import add_to  # Triton is on GPUs only

                add_to(weights.main_grad, of_weights)
            else:
                weights.main_grad.add_(of_weights)
            weights.grad_added_to_main_grad = True  # Megatron's hook wants a gradient, and then leaves it
        return of_tokens, of_weights, None


def _products(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each token times the transposed matrix of its expert, [n, rows]."""
    if len(tokens) == 0:  # this rank's experts were never chosen; they have the gradient 0 all the same
        return tokens @ weights[0].t()
    products: Tensor = _GroupedProduct.apply(tokens, weights, ends)  # type: ignore[no-untyped-call]
    return products
