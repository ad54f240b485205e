"""Router of a mixture of experts, and the balance of its experts' load.

megatron-core 0.16.1's own router multiplies the auxiliary loss by the tokens of one tensor-parallel rank instead of all
(its gradient is wrong by a factor of tp), and expects another normalization than by the targets of the global batch.

**The auxiliary loss** is that of Fedus et al. 2021 (arXiv 2101.03961, eq. 4-6) as transformers writes it: E * sum_e f_e
P_e, with f_e the assignments of expert e per token and P_e the mean probability of e, over the non-padding tokens of a
microbatch. It is averaged over microbatches, weighted by their tokens, and over layers, and multiplied by the model's
coefficient. Each layer is balanced separately, as in Megatron-LM, because the f and P of other pipeline stages are not
available in time; transformers 5.23 averages f and P over the layers first, which is the same for one layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.gating import Gating
from lightning_megatron.engine.ops.routing import Routing


class Router(TopKRouter):
    """Top-k router in fp32: softmax over all experts, or sigmoids.

    Megatron's parameters are ``weight``, [experts, h], and with ``has_bias`` ``bias``, [experts].

    With ``moe_router_enable_expert_bias`` or ``has_selection_bias`` experts are selected by the sum of score and
    ``expert_bias``, [experts], fp32, which is updated each step by the load of the experts (Wang et al. 2024, arXiv
    2408.15664). The auxiliary loss of a softmax counts experts as if there were no bias, as in transformers. With
    ``moe_router_num_groups`` they are selected from the ``moe_router_group_topk`` groups of the largest two scores
    (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2).

    Attributes:
        num_tokens: [], fp32: non-padding tokens of the global batch; None outside of a training step.
        load: [1 + experts], fp32, of the step: this rank's part of the auxiliary loss, coefficient included, and the
            number of tokens of this replica that were assigned to each expert.
    """

    load: Tensor

    def __init__(
        self,
        *args: Any,
        has_bias: bool,
        has_selection_bias: bool,
        min_topk_sum: float,
        **kwargs: Any,
    ) -> None:
        """Create the router.

        Args:
            args: Those of Megatron-Core's own router, of which 0.19 has more.
            has_bias: Overrides ``add_bias_linear``, Megatron's one switch for all linears.
            has_selection_bias: Whether there is an ``expert_bias``, whatever the config says, which cannot with a
                softmax.
            min_topk_sum: Smallest divisor in the normalization of probabilities.
            kwargs: Likewise Megatron's.
        """
        super().__init__(*args, **kwargs)
        self.bias = None
        if has_bias:
            self.bias = torch.nn.Parameter(self.weight.new_zeros(len(self.weight)))
            self.bias.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        if has_selection_bias and self.expert_bias is None:
            del self.expert_bias
            zeros = torch.zeros(
                len(self.weight),
                dtype=torch.float32,
                device=torch.cuda.current_device(),
            )
            self.register_buffer("expert_bias", zeros)
        scaling_factor = self.config.moe_router_topk_scaling_factor
        self._routing = Routing(
            topk=self.topk,
            is_sigmoid=self.score_function == "sigmoid",
            is_normalized=not self.config.moe_router_pre_softmax,
            min_sum=min_topk_sum,
            scale=1.0 if scaling_factor is None else scaling_factor,
        )
        frequency = self.config.moe_layer_freq
        self._num_layers: int = self.config.num_layers
        if isinstance(frequency, list):
            self._num_layers = sum(frequency)
        self.num_tokens: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Logits of tokens, [s or s/tp, b, experts], fp32, of ``input`` [s or s/tp, b, h]."""
        is_on_gpu = input.is_cuda and self.weight.is_cuda
        if not is_on_gpu or not input.dtype is self.weight.dtype is torch.bfloat16:
            wide: Tensor = super().gating(input)
            return wide
        logits: Tensor = Gating.apply(input.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            logits = logits + self.bias.float()
        return logits.view(*input.shape[:-1], -1)

    def routing(
        self,
        logits: Tensor,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Select the experts of each token.

        Args:
            logits: [s or s/tp, b, experts], fp32.
            padding_mask: [s or s/tp, b], bool, True for padding; None for no padding.

        Returns:
            Probabilities, fp32, by which the outputs of the experts are multiplied, and expert indices, int64: each
            [tokens, topk].
        """
        logits = logits.view(-1, logits.shape[-1]).float()
        is_padding = None
        if padding_mask is not None:
            is_padding = padding_mask.reshape(-1)
        trains = self.training and torch.is_grad_enabled() and self.num_tokens is not None
        if logits.is_cuda and self._has_kernel:
            # Imported here: Triton is on GPUs only.
            from lightning_megatron.engine.ops.triton.router import route

            routed = route(logits, self.expert_bias, is_padding, self._routing)
            probs = routed.probs
            if trains:
                probs = self._attach_aux_loss(probs, routed.score_sums, routed.counts[None])
            return probs, routed.experts
        probs, experts, scores = self._choose(logits)
        if trains:
            probs = self._attach_aux_loss(probs, *self._sums(scores, experts, is_padding))
        return probs, experts

    @property
    def _has_kernel(self) -> bool:
        """Whether one Triton kernel routes on a GPU: not by groups, nor by a softmax with a selection bias."""
        has_biased_softmax = self.expert_bias is not None and self.score_function == "softmax"
        return self.config.moe_router_num_groups is None and not has_biased_softmax

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities and experts of each token, [tokens, topk], and its scores, [tokens, experts]."""
        routing = self._routing
        scores = torch.sigmoid(logits) if routing.is_sigmoid else torch.softmax(logits, dim=-1)
        experts = torch.topk(self._selection_scores(scores), routing.topk, dim=-1).indices
        probs = scores.gather(1, experts)
        if routing.is_sigmoid:
            # For the auxiliary loss, as in Megatron.
            scores = scores / scores.sum(dim=-1, keepdim=True)
        if routing.is_normalized:
            total = probs.sum(dim=-1, keepdim=True)
            if routing.min_sum > 0.0:
                total = total.clamp(min=routing.min_sum)
            probs = probs / total
        if routing.scale != 1.0:
            probs = probs * routing.scale
        return probs, experts, scores

    @torch.no_grad()
    def _selection_scores(self, scores: Tensor) -> Tensor:
        """Scores by which experts are selected, [tokens, experts]: with bias, and -inf outside of a token's groups."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        num_groups = self.config.moe_router_num_groups
        if num_groups is None:
            return scores
        groups = scores.view(len(scores), num_groups, -1)
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
        chosen = group_scores.topk(self.config.moe_router_group_topk, dim=-1).indices
        is_outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, chosen, False)
        return groups.masked_fill(is_outside[..., None], -torch.inf).view_as(scores)

    def _sums(
        self,
        scores: Tensor,
        experts: Tensor,
        is_padding: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sums over the tokens that are not padding, for the auxiliary loss.

        Returns:
            The sum of scores, [experts], and the number of tokens for which each expert is chosen, [1, experts], fp32;
            [2, experts] if the auxiliary loss counts other choices.
        """
        choices = [experts]
        if self.expert_bias is not None and self.score_function == "softmax":
            choices.append(torch.topk(scores, self.topk, dim=-1).indices)
        is_token = None
        if is_padding is not None:
            is_token = ~is_padding[:, None]
            scores = scores * is_token
        all_counts = torch.stack([self._count(choice, is_token) for choice in choices])
        return scores.sum(dim=0), all_counts

    def _attach_aux_loss(
        self,
        probs: Tensor,
        score_sums: Tensor,
        all_counts: Tensor,
    ) -> Tensor:
        """Return ``probs`` with the backward pass of the auxiliary loss attached; see ``_sums``."""
        assert self.num_tokens is not None
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(all_counts, group=self.tp_cp_group)
        counts = all_counts[0]
        balanced = all_counts[-1]
        share = balanced * self.topk / balanced.sum().clamp(min=1.0)
        factor = self.config.moe_aux_loss_coeff * self.config.num_moe_experts / self._num_layers
        product = (share * score_sums).sum()
        loss = factor * product / self.num_tokens
        self.load[0] += loss.detach()
        if self.tp_cp_group.rank() == 0:
            self.load[1:] += counts
        attached: Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return attached

    def _count(self, experts: Tensor, is_token: Tensor | None) -> Tensor:
        """Number of tokens for which each expert is chosen, [experts], fp32.

        Args:
            experts: [tokens, topk], int64.
            is_token: [tokens, 1], bool, False for padding; None for no padding.
        """
        shape = (len(experts), self.config.num_moe_experts)
        nowhere = torch.zeros(shape, dtype=torch.bool, device=experts.device)
        routing_map = nowhere.scatter(1, experts, True)
        if is_token is not None:
            routing_map = routing_map & is_token
        return routing_map.sum(dim=0).float()


def keep_biases_in_fp32(chunks: Iterable[torch.nn.Module]) -> None:
    """Return the expert biases of 16-bit chunks to fp32: a rounded bias selects other experts."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router) and module.expert_bias is not None:
                module.expert_bias = module.expert_bias.float()


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
            self.counts.sum(dim=1, keepdim=True) > 0,
            self._relative_loads,
            torch.inf,
        ).amin()

    @property
    def _relative_loads(self) -> Tensor:
        mean = self.counts.mean(dim=1, keepdim=True)
        return self.counts / mean.clamp(min=1e-9)


class LoadBalance:
    """Measures and balances the load of the experts in this rank's model chunks."""

    def __init__(
        self,
        config: TransformerConfig,
        chunks: Iterable[torch.nn.Module],
    ) -> None:
        self._shape = (config.num_layers, 1 + config.num_moe_experts)
        self._bias_rate = config.moe_router_bias_update_rate
        modules = torch.nn.ModuleList(chunks).modules()
        self._routers = [module for module in modules if isinstance(module, Router)]

    def begin(self, tokens: Tensor) -> None:
        """Begin a step with ``tokens``, [], fp32: the number of non-padding tokens over all ranks."""
        for router in self._routers:
            router.num_tokens = tokens.clamp(min=1.0)
            router.load = tokens.new_zeros(self._shape[1])

    def end(self, device: torch.device) -> LoadReport:
        """End the step: all-reduce the loads and update the expert biases; collective over the world.

        A router that is frozen, as with LoRA, keeps its biases: files of adapters do not have them.
        """
        loads = torch.zeros(self._shape, device=device)
        for router in self._routers:
            loads[router.layer_number - 1] = router.load
            router.num_tokens = None
        dist.all_reduce(loads)
        counts = loads[:, 1:]
        for router in self._routers:
            if router.expert_bias is not None and router.weight.requires_grad:
                # Megatron's own update adds 0: its counts, in bf16 for a bf16 model, are not set by this router.
                load = counts[router.layer_number - 1]
                router.expert_bias += self._bias_rate * (load.mean() - load).sign()
        return LoadReport(loss=loads[:, 0].sum(), counts=counts)
