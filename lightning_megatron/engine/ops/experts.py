"""Grouped experts: the MLPs of all experts of a rank by grouped matrix products, without Transformer Engine.

megatron-core 0.16.1's ``SequentialMLP`` launches two GEMMs for each expert, its ``GroupedMLP`` needs another package.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.recompute import RecomputedOutput, recomputes_cheap_outputs


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
        self._ep = pg_collection.ep
        self._dp = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size
        hidden = config.hidden_size
        count = num_local_experts
        rows = width
        if config.gated_linear_unit:
            rows = 2 * width
        self.linear_fc1 = self._create_weight(count, rows, hidden)
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

    def forward(
        self,
        tokens: Tensor,
        ends: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, None]:
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
            self._activation,
            _grouped_matmul(tokens, self.linear_fc1, ends),
            probs,
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
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One entry per matrix of each expert, as for ``SequentialMLP``."""
        build = partial(self._shards, sharded_offsets)
        replica = (0, 0, self._dp.rank())
        state = {}
        for name, weight in self.named_parameters():
            key = f"{prefix}experts.{name}.weight"
            state[prefix + name] = ShardedTensorFactory(key, weight, build, torch.stack, replica)
        return state

    @torch.no_grad()
    def _shards(
        self,
        offsets: Any,
        key: str,
        weight: Tensor,
        replica: Any,
        flattened: Any,
    ) -> list[ShardedTensor]:
        axes = len(offsets)
        count = len(weight)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                expert,
                *offsets,
                (
                    axes,
                    self._ep.rank() * count + index,
                    self._ep.size() * count,
                ),
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
    def forward(
        ctx: Any,
        tokens: Tensor,
        weights: Tensor,
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.weights = weights
        products: Tensor = F.grouped_mm(
            tokens,
            weights.transpose(1, 2),
            offs=ends,
        )
        return products

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, ends = ctx.saved_tensors
        weights = ctx.weights
        gradient = upstream[0].contiguous()
        d_tokens = None
        if ctx.needs_input_grad[0]:
            d_tokens = F.grouped_mm(gradient, weights, offs=ends)
        if not ctx.needs_input_grad[1]:
            return d_tokens, None, None
        d_weights = F.grouped_mm(gradient.t(), tokens, offs=ends)
        if hasattr(weights, "main_grad"):
            if d_weights.is_cuda:
                # Imported here: Triton is on GPUs only.
                from lightning_megatron.engine.ops.triton.experts import add_to

                add_to(weights.main_grad, d_weights)
            else:
                weights.main_grad.add_(d_weights)
            # Megatron's hook requires a gradient, and then ignores it.
            weights.grad_added_to_main_grad = True
        return d_tokens, d_weights, None


def _grouped_matmul(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Product of each token and the transposed matrix of its expert, [n, rows of a matrix]."""
    if len(tokens) == 0:
        # None of this rank's experts was selected; their gradient is 0 all the same.
        return tokens @ weights[0].t()
    products: Tensor = _GroupedMatmul.apply(tokens, weights, ends)  # type: ignore[no-untyped-call]
    return products
