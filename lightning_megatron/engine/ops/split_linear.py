"""Linears of tensor parallelism that overlap their communication with their products, by peer copies.

All-gather + matmul begins with this rank's rows while those of other ranks arrive; matmul + reduce-scatter first
computes the rows of other ranks, which are sent while it computes its own. In the backward pass the reduce-scatter of a
column-parallel linear overlaps with its weight gradient, and its gathered input is kept instead of being gathered
again: s * b * h elements for each of two linears of a layer instead of a tp-th of them. ``fp8.py`` extends it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from lightning_megatron.engine.ops import peer_copies
from lightning_megatron.engine.ops.peer_copies import Collectives, PeerCopies, Product
from lightning_megatron.engine.ops.weight_gradients import (
    accumulate_weight_gradient,
    placeholder_gradient,
)


def reduce_over_tp(output: Tensor, linear: Any) -> Tensor:
    """Reduce the output of a row-parallel linear that is set not to communicate, as Megatron's own linear does.

    Args:
        output: This rank's addend of the sum over the tp group, [s, b, h].
        linear: The linear.

    Returns:
        The sum, [s, b, h], or under sequence parallelism this rank's shard of it, [s/tp, b, h]. Generation during
        training turns sequence parallelism off.
    """
    if linear.sequence_parallel:
        reduce = reduce_scatter_to_sequence_parallel_region
    else:
        reduce = reduce_from_tensor_model_parallel_region
    reduced: Tensor = reduce(output, group=linear.tp_group)
    return reduced


class Operand(NamedTuple):
    """Matrix [m, n] in the layouts that GEMMs read."""

    rows: Any
    """[m, n]; None if it is not needed."""
    columns: Any
    """Transpose, [n, m], in fp8 [n, m padded to a multiple of 16]; None if it is not needed."""
    scale: Any
    """[1], fp32: factor of fp8 values; None for other dtypes."""


Scales = tuple[Any, Any]
"""Scales of both operands of a product."""


class SplitLinear:
    """Product of Megatron's parallel linears in training, fused with their communication; elsewhere Megatron's own.

    Megatron's row-parallel linear reduces or reduce-scatters after its product, and gathers gradients before: here both
    are part of the product. ``explicit_expert_comm`` is Megatron's flag for a linear that does not communicate.
    """

    def __init__(self, module: Any, collectives: Collectives) -> None:
        """Replace the product of ``module``."""
        self.module = module
        self.collectives = collectives
        self.original = module._forward_impl
        self.is_row = isinstance(module, RowParallelLinear)
        if self.is_row and collectives.size > 1:
            module.explicit_expert_comm = True

    @property
    def is_active(self) -> bool:
        """Whether this product is used instead of Megatron's."""
        return bool(self.module.training) and torch.is_grad_enabled()

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Map [s or s/tp, b, in] to [s or s/tp, b, out]; ``options`` are for Megatron's own product."""
        output: Tensor
        if self.is_active:
            output = _LinearProduct.apply(  # type: ignore[no-untyped-call]
                input.flatten(0, -2),
                weight,
                bias,
                self,
                torch.is_grad_enabled(),
            )
            # Not in the autograd function, whose output the models may overwrite.
            output = output.view(-1, *input.shape[1:-1], output.shape[-1])
        else:
            output = self.original(
                input=input,
                weight=weight,
                bias=bias,
                **options,
            )
        has_scattered = self.is_active and self.module.sequence_parallel  # as part of the product
        if self.is_row and self.collectives.size > 1 and not has_scattered:
            return reduce_over_tp(output, self.module)
        return output

    # ---- operands: as they are here, quantized in fp8.py ----

    def operand(
        self,
        x: Tensor,
        *,
        columns: bool,
        is_gathered: bool,
        is_gradient: bool = False,
    ) -> Operand:
        """Operand of inputs or gradients, [tokens, n].

        Args:
            x: This rank's rows.
            columns: Whether the transpose is needed.
            is_gathered: Whether the rows will be all-gathered into one matrix; then this is collective over the group.
            is_gradient: Whether these are gradients of outputs.
        """
        return Operand(x, x.t(), None)

    def weight_operand(self, weight: Tensor, *, columns: bool) -> Operand:
        """Operand of the weight, [out, in]."""
        return Operand(weight, weight.t(), None)

    def transposed(self, rows: Tensor) -> Tensor:
        """Transpose gathered rows: their ``columns``."""
        return rows.t()

    def product(
        self,
        weight: Tensor,
        scales: Scales,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Product:
        """Product ``rows @ weight.t() + bias`` in ``dtype``; weight: [n, k]."""

        def write(rows: Tensor, out: Tensor) -> Tensor:
            if bias is None:
                return torch.mm(rows, weight.t(), out=out)
            return torch.addmm(bias, rows, weight.t(), out=out)

        return Product(len(weight), dtype, write)

    def add_weight_gradient(
        self,
        main_grad: Tensor,
        gradient: Tensor,
        inputs: Tensor,
        scales: Scales,
    ) -> None:
        """Add ``gradient @ inputs.t()`` to main_grad, [out, in]; gradient: [out, tokens], inputs: [in, tokens]."""
        accumulate_weight_gradient(inputs.t(), gradient.t(), main_grad)

    def weight_gradient(
        self,
        weight: Any,
        gradient: Tensor,
        inputs: Tensor,
        scales: Scales,
    ) -> Tensor | None:
        """Weight gradient ``gradient @ inputs.t()``; a placeholder if it is added to ``main_grad`` instead."""
        if not (self.module.gradient_accumulation_fusion and hasattr(weight, "main_grad")):
            return self.product(inputs, scales, weight.dtype)(gradient)
        self.add_weight_gradient(weight.main_grad, gradient, inputs, scales)
        return placeholder_gradient(weight)


class _LinearProduct(torch.autograd.Function):
    """``rows @ weight.t() + bias`` with the all-gather before or the reduce-scatter after it, and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: SplitLinear,
        has_backward: bool,
    ) -> Tensor:
        is_split = linear.module.sequence_parallel
        ctx.gathers = is_split and not linear.is_row
        ctx.scatters = is_split and linear.is_row
        keeps_input = has_backward and ctx.needs_input_grad[1]
        x = linear.operand(
            rows,
            columns=keeps_input and not ctx.gathers,
            is_gathered=ctx.gathers,
        )
        w = linear.weight_operand(weight, columns=has_backward or linear.module.training)
        product = linear.product(w.rows, (x.scale, w.scale), rows.dtype, bias)
        saved = x.columns
        if ctx.gathers:
            saved, output = linear.collectives.all_gather_matmul(x.rows, product)
        elif ctx.scatters:
            output = linear.collectives.matmul_reduce_scatter(x.rows, product)
        else:
            output = product(x.rows)
        if has_backward:
            ctx.save_for_backward(
                saved if keeps_input else None,
                x.scale,
                w.columns,
                w.scale,
            )
            ctx.linear = linear
            ctx.weight = weight
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        linear: SplitLinear = ctx.linear
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = gradients[0].contiguous()
        columns = needs_weight and not ctx.scatters
        dy = linear.operand(
            rows,
            columns=columns,
            is_gathered=ctx.scatters,
            is_gradient=True,
        )
        product = linear.product(weight, (dy.scale, weight_scale), rows.dtype)
        d_input: Tensor | None
        d_parameters: list[Tensor | None] = [None, None]

        def differentiate_parameters(columns: Tensor = dy.columns) -> None:
            if needs_weight:
                inputs = x
                if ctx.gathers:
                    inputs = linear.transposed(x)
                scales = (dy.scale, x_scale)
                d_parameters[0] = linear.weight_gradient(ctx.weight, columns, inputs, scales)
            if needs_bias:
                d_parameters[1] = rows.sum(0)

        if ctx.scatters:
            gathered, d_input = linear.collectives.all_gather_matmul(dy.rows, product)
            if needs_weight:
                differentiate_parameters(linear.transposed(gathered))
        elif ctx.gathers and needs_input:
            d_input = linear.collectives.matmul_reduce_scatter(
                dy.rows, product, differentiate_parameters
            )
        else:
            d_input = None
            handle = None
            if needs_input:
                d_input = product(dy.rows)
                if not linear.is_row and linear.module.allreduce_dgrad:
                    group = linear.collectives.group
                    handle = dist.all_reduce(d_input, group=group, async_op=True)
            differentiate_parameters()
            if handle is not None:
                handle.wait()
        return d_input, *d_parameters, None, None


def use_for_linears(chunks: Iterable[torch.nn.Module]) -> None:
    """Use peer copies in linears that gather or scatter rows, except in experts; collective over their tp groups."""
    copies_of: dict[dist.ProcessGroup, PeerCopies | None] = {}
    for module in torch.nn.ModuleList(chunks).modules():
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            continue
        if not module.sequence_parallel:
            continue
        # A SplitLinear of an earlier fit, or an Fp8Linear.
        linear: Any = vars(module).get("_forward_impl")
        if linear is None and module.explicit_expert_comm:
            continue
        if module.tp_group not in copies_of:
            copies_of[module.tp_group] = peer_copies.create_peer_copies(module.tp_group)
        copies = copies_of[module.tp_group]
        if copies is None:
            continue
        if linear is None:
            linear = SplitLinear(module, copies)
            module._forward_impl = linear
        linear.collectives = copies
