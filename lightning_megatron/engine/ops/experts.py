"""Grouped experts: the MLPs of all experts of a rank by grouped matrix products, without Transformer Engine.

megatron-core 0.16.1's ``SequentialMLP`` launches two GEMMs for each expert, its ``GroupedMLP`` needs another package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.gathered_dispatch import has_spare_rows
from lightning_megatron.engine.ops.recompute import RecomputedOutput, recomputes_cheap_outputs
from lightning_megatron.engine.ops.weight_gradients import placeholder_gradient


class ExpertBias(torch.nn.Module):
    """Bias of one linear of each expert: ``bias`` [experts/ep, rows], a name by which Megatron decays no weights."""

    def __init__(self, bias: torch.nn.Parameter) -> None:
        super().__init__()
        self.bias = bias


class GroupedExperts(MegatronModule):
    """MLPs of this rank's experts, as two grouped GEMMs (``torch.nn.functional.grouped_mm``).

    Parameters ``linear_fc1`` [experts/ep, (2 *) ffn, h] and ``linear_fc2`` [experts/ep, h, ffn], and biases; their
    gradients are reduced over Megatron's expert-data-parallel group, which includes tensor-parallel ranks. Checkpoints
    have separate tensors per expert, with the names of Megatron's ``SequentialMLP``, so that they load at any ep.

    A submodule ``linear_fc1_lora`` or ``linear_fc2_lora``, if there is one, adds to the output of that linear
    (models/lora.py): it is called with the linear's input and output, and with the ends of each expert's tokens.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        *,
        has_biases: bool,
        activation: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> None:
        """Create the weights.

        Args:
            num_local_experts: As for Megatron's ``SequentialMLP``.
            config: Likewise.
            pg_collection: Likewise.
            name: Likewise, from 0.19 on; unused.
            has_biases: Whether both linears have biases.
            activation: Function of the first linear's output, [n, (2 *) ffn], and of factors of its result, [n], fp32,
                that returns [n, ffn]; None for the config's.
        """
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
        self.linear_fc1_bias = None
        self.linear_fc2_bias = None
        if has_biases:
            self.linear_fc1_bias = ExpertBias(self._create_weight(count, rows))
            self.linear_fc2_bias = ExpertBias(self._create_weight(count, hidden))
        self.activation = activation
        self._has_spare_rows = has_spare_rows(config)

    def _create_weight(self, *shape: int) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        weight = torch.nn.Parameter(
            torch.empty(*shape, dtype=self.config.params_dtype, device=device)
        )
        mark_as_of_experts(weight)
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
            ends: [experts/ep], int32, on the device: end of each expert's tokens. Tokens from the last end on are not
                computed, and their outputs and gradients hold anything.
            probs: [n], fp32: factors of the outputs.

        Returns:
            Outputs, [n, h], and no bias.
        """
        recomputes = recomputes_cheap_outputs(self.config)
        first = RecomputedOutput()
        rows = first.checkpoint(self._first_linear, tokens, ends)
        activated = RecomputedOutput()
        hidden = activated.checkpoint(
            self._activation,
            rows,
            probs,
            ends,
        )
        output = self._product("linear_fc2", hidden, ends)
        if self.linear_fc2_bias is not None:
            # The rows of ``hidden`` have their factors already.
            output = self._add_bias(output, self.linear_fc2_bias.bias, ends, probs)
        if recomputes and self._has_spare_rows and not self._draws_numbers():
            first.discard_output_and_register_recompute(output)
        if recomputes:
            activated.discard_output_and_register_recompute(output)
        return output, None

    def _first_linear(self, tokens: Tensor, ends: Tensor) -> Tensor:
        rows = self._product("linear_fc1", tokens, ends)
        if self.linear_fc1_bias is not None:
            rows = self._add_bias(rows, self.linear_fc1_bias.bias, ends)
        return rows

    def _draws_numbers(self) -> bool:
        """Whether a second call of the first linear gives another result, by the dropout of its adapters."""
        adapters = getattr(self, "linear_fc1_lora", None)
        return self.training and adapters is not None and adapters.dropout > 0.0

    def _add_bias(
        self,
        rows: Tensor,
        biases: Tensor,
        ends: Tensor,
        factors: Tensor | None = None,
    ) -> Tensor:
        """Rows and the bias of their experts; see ``_add_bias``."""
        biased = _add_bias(rows, biases, ends, factors)
        if not self._has_spare_rows:
            return biased
        # Gradients of rows that do not exist hold anything, and would be summed with those of the biases.
        exists = torch.arange(len(rows), device=rows.device) < ends[-1]
        return torch.where(exists[:, None], biased, 0.0)

    def _product(self, linear: str, tokens: Tensor, ends: Tensor) -> Tensor:
        """Output of one linear for each token, with what its adapters add: [n, rows of a matrix]."""
        output = grouped_matmul(tokens, getattr(self, linear), ends)
        adapters = getattr(self, f"{linear}_lora", None)
        if adapters is not None:
            output = adapters(tokens, output, ends)
        return output

    def _activation(
        self,
        hidden: Tensor,
        probs: Tensor,
        ends: Tensor,
    ) -> Tensor:
        if self.activation is not None:
            return self.activation(hidden, probs)
        is_swiglu = self.config.gated_linear_unit and self.config.activation_func is F.silu
        if is_swiglu and self.config.bias_activation_fusion and hidden.is_cuda:
            # Imported here: Triton is on GPUs only.
            from lightning_megatron.engine.ops.triton.expert_rows import weighted_swiglu

            return weighted_swiglu(hidden, probs, ends[-1:])
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
        """One entry per matrix and bias of each expert, as for ``SequentialMLP``."""
        build = partial(self._shards, sharded_offsets)
        replica = (0, 0, self._dp.rank())
        state = {}
        for name, weight in self.named_parameters():
            key = f"{prefix}experts.{_name_in_checkpoints(name)}"
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


def _name_in_checkpoints(parameter: str) -> str:
    """Name of a parameter of ``GroupedExperts`` in checkpoints, where each expert is a module."""
    linear, _, kind = parameter.partition(".")
    if not kind:
        return f"{linear}.weight"
    if kind == "bias":
        return f"{linear.removesuffix('_bias')}.bias"
    return parameter  # of adapters


def mark_as_of_experts(weight: torch.nn.Parameter) -> None:
    """Mark a parameter that holds a matrix for each expert of this rank, [experts/ep, ...], for Megatron.

    Its gradient is then reduced over the expert-data-parallel group: the tokens of an expert are on its own rank alone.
    """
    # Also at ep=1, so that the optimizer's parameter groups are the same at any ep.
    weight.allreduce = False  # type: ignore[attr-defined]
    # For the gradient norm: megatron-core 0.16.1, optimizer/optimizer.py, counts parameters that are not tensor
    # parallel on the first tp rank only, and would miss the experts (or optimizer shards) of the others.
    set_tensor_model_parallel_attributes(weight, True, 0, 1)


def clamped_swiglu(
    rows: Tensor,
    factors: Tensor,
    *,
    alpha: float,
    limit: float,
) -> Tensor:
    """Clamped SwiGLU of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate) * factor, [n, ffn].

    Source: OpenAI 2025 (arXiv 2508.10925), section 2.2.

    Args:
        rows: [n, 2 * ffn]: gate, then up.
        factors: [n], fp32.
        alpha: Factor of the gate in the sigmoid.
        limit: Largest gate, and largest absolute value of up.
    """
    # Eagerly it is eight kernels.
    compute = compiled_for(rows, _clamped_swiglu, is_dynamic=True)
    activated: Tensor = compute(rows, factors, alpha, limit)
    return activated


def _clamped_swiglu(
    rows: Tensor,
    factors: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    activated = (up + 1) * (gate * torch.sigmoid(alpha * gate))
    return (activated * factors[:, None]).to(rows.dtype)


def _add_bias(
    rows: Tensor,
    biases: Tensor,
    ends: Tensor,
    factors: Tensor | None = None,
) -> Tensor:
    """Add to each row the bias of its expert, [n, rows of a bias].

    As a product of matrices, which sums the gradients of the biases in fp32 and in a fixed order.

    Args:
        rows: [n, rows of a bias], sorted by expert.
        biases: [experts/ep, rows of a bias].
        ends: [experts/ep], int32: end of each expert's rows.
        factors: [n], fp32: factors of the biases; None for 1.
    """
    positions = torch.arange(len(rows), device=rows.device)
    expert_of_row = torch.searchsorted(ends, positions, right=True)
    experts = torch.arange(len(biases), device=rows.device)
    is_of_expert = (expert_of_row[:, None] == experts).to(rows.dtype)
    if factors is not None:
        is_of_expert = (is_of_expert * factors[:, None]).to(rows.dtype)
    return torch.addmm(rows, is_of_expert, biases)


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
        if not hasattr(weights, "main_grad"):
            return d_tokens, F.grouped_mm(gradient.t(), tokens, offs=ends), None
        _add_weight_gradient(gradient, tokens, ends, weights.main_grad)
        return d_tokens, placeholder_gradient(weights), None


def _add_weight_gradient(
    gradient: Tensor,
    tokens: Tensor,
    ends: Tensor,
    main_grad: Tensor,
) -> None:
    """Add to each expert's matrix of ``main_grad``, [experts/ep, rows, columns], the product of its rows.

    Args:
        gradient: [n, rows], contiguous, sorted by expert.
        tokens: [n, columns], likewise.
        ends: [experts/ep], int32: end of each expert's rows.
        main_grad: In the dtype of ``tokens`` or float32.
    """
    if not main_grad.is_cuda:
        main_grad.add_(F.grouped_mm(gradient.t(), tokens, offs=ends))
        return
    # Imported here: Triton is on GPUs only.
    from lightning_megatron.engine.ops.triton.grouped_gradient import (
        add_grouped_gradient,
        add_to,
        can_add_grouped_gradient,
    )

    if can_add_grouped_gradient(gradient, tokens, main_grad):
        add_grouped_gradient(gradient, tokens, ends, main_grad)
    else:
        add_to(main_grad, F.grouped_mm(gradient.t(), tokens, offs=ends))


def grouped_matmul(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Product of each token and the transposed matrix of its expert, [n, rows of a matrix].

    Args:
        tokens: [n, columns of a matrix], sorted by expert.
        weights: [experts/ep, rows, columns]; rows are multiples of 16 bytes, as ``grouped_mm`` wants them.
        ends: [experts/ep], int32: end of each expert's tokens.
    """
    if len(tokens) == 0:
        # None of this rank's experts was selected; their gradient is 0 all the same.
        return tokens @ weights[0].t()
    products: Tensor = _GroupedMatmul.apply(tokens, weights, ends)  # type: ignore[no-untyped-call]
    return products
