"""FP8 linears of transformer layers: forward, input-gradient and weight-gradient products by ``torch._scaled_mm``.

One scale per tensor from its current absolute maximum ("tensorwise", current scaling): e4m3 for activations and
weights, e5m2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433). Weight gradients are fp32 and added to
``main_grad``; weights are quantized once a step, for all its microbatches. Embedding, output layer, heads, attention,
norms and checkpoints stay as in bf16. Activations are kept in fp8 for the backward pass.

- Under sequence parallelism tensors are all-gathered in fp8, half the bytes of bf16, in both passes: activations before
  a column-parallel linear, which are kept, and gradients before a row-parallel one. The ranks of the tp group first
  all-reduce the absolute maximum (one number), so the gathered tensor is exactly what one rank would compute. GPUs of
  one host overlap the copies with the products (``peer_copies.py``).
- Tensors that are not gathered (weights, activations inside a block) have a scale per shard, which is never coarser.
- Training, validation and test run in fp8 (everything that goes through ``Schedule``); generation runs in bf16.
- The first microbatch of a step writes its weight gradient instead of adding it: the buffer has just been zeroed. The
  others add theirs in the product's epilogue (``cublaslt.py``), on a CPU in a pass of its own.
- The maximum of most tensors comes from the kernel that wrote them (``magnitudes.py``).

On an H200, alternating with bf16 in the same run: llama-1b 74,319 instead of 62,406 tokens/s (peak 52.2 instead of 52.9
GiB), 8 layers of Llama-3-8B 49,836 instead of 38,931 (62.2 instead of 60.1: weights in fp8 and transposed).

Rejected: scales per row (measured 0.9 x of bf16 elsewhere, the GEMM is slower), delayed scaling by earlier steps (state
that checkpoints would have to hold), Transformer Engine's layers (other weight names, modules and random streams).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.ops.cublaslt import add_product
from lightning_megatron.engine.ops.magnitudes import largest_magnitude, mark
from lightning_megatron.engine.ops.peer_copies import Collectives, Product
from lightning_megatron.engine.ops.split_linear import Operand, Scales, SplitLinear
from lightning_megatron.engine.settings import Recipe
from lightning_megatron.errors import ConfigError, require_choice

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
ALIGNMENT = 16
"""Each dimension of a matrix must be a multiple of it; the token dimension is padded with zeros."""
_MIN_AMAX = 1e-30
"""Lower bound of the absolute maximum, against division by 0; small enough for any gradient."""

FAST_BACKWARD = True
"""Whether gradients are accumulated in the tensor cores' own (14-bit) registers, as in the forward pass.

It makes a step 2 % faster, and the products of a Llama-3-8B layer 0.2 to 0.4 % less exact where quantizing costs 6 %.
The loss of 1,000 steps is within the noise of seeds (``python -m benchmarks.convergence``, which sets this).
"""
MEASURED_SPEEDUPS = {2048: 1.22, 4096: 1.40}
"""Steps per second relative to bf16, by hidden size: llama-1b and 8 layers of Llama-3-8B on an H200, torch 2.11."""


# ---- quantization ----------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    *,
    columns: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Operand:
    """Quantize ``x`` to fp8 with one scale.

    Args:
        x: [m, n], contiguous.
        dtype: An fp8 dtype.
        columns: Whether the transpose is needed, too.
        group: Ranks whose shards share the scale (one all-reduce, collective over it); None for this rank alone.
    """
    amax = largest_magnitude(x)
    if group is not None:
        amax = amax.clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return _cast(x, dtype, amax, rows=True, columns=columns)


def _cast(
    x: Tensor,
    dtype: torch.dtype,
    amax: Tensor,
    *,
    rows: bool,
    columns: bool,
) -> Operand:
    m, n = x.shape
    quantized = transposed = None
    if rows:
        quantized = torch.empty((m, n), dtype=dtype, device=x.device)
    if columns:
        padded = -(-m // ALIGNMENT) * ALIGNMENT
        transposed = torch.empty((n, padded), dtype=dtype, device=x.device)
    if x.is_cuda:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.fp8 import fp8_cast

        scale = fp8_cast(x, amax, _MIN_AMAX, quantized, transposed)
        return Operand(quantized, transposed, scale)
    amax = amax.clamp(min=_MIN_AMAX)
    # Division of two tensors is rounded correctly, as in the kernel; division of a number by a tensor is not.
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    values = (x.float() * (limit / amax)).to(dtype)
    if transposed is not None:
        transposed.zero_()[:, :m] = values.t()
    return Operand(values if rows else None, transposed, amax / limit)


# ---- linears ---------------------------------------------------------------------------------------------------------


class Fp8Linear(SplitLinear):
    """Product of Megatron's parallel linears in fp8; outside of ``quantized_weights`` in bf16."""

    is_active = False

    def __init__(self, module: ColumnParallelLinear | RowParallelLinear) -> None:
        """Replace the product of ``module``."""
        super().__init__(module, Collectives(module.tp_group))
        self.weight: Operand | None = None
        """Quantized weight of the current step; None until a microbatch needs it."""
        self.has_gradient = False
        """Whether a microbatch of the current step has written ``main_grad``."""

    @override
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        output = super().__call__(input, weight, bias, **options)
        if self.is_active:
            mark(output)
        return output

    @override
    def operand(
        self,
        x: Tensor,
        *,
        columns: bool,
        is_gathered: bool,
        is_gradient: bool = False,
    ) -> Operand:
        group = None
        if is_gathered:
            group = self.collectives.group
        dtype = E5M2 if is_gradient else E4M3
        return quantize(x.contiguous(), dtype, columns=columns, group=group)

    @override
    def weight_operand(self, weight: Tensor, *, columns: bool) -> Operand:
        """Quantize at first use in a step: by then the parameters have been all-gathered."""
        if self.weight is None or (columns and self.weight.columns is None):
            self.weight = quantize(weight.detach(), E4M3, columns=columns)
        return self.weight

    @override
    def transposed(self, rows: Tensor) -> Tensor:
        """Transpose fp8 rows, exactly: the scale is 1."""
        unscaled = torch.full((1,), torch.finfo(rows.dtype).max, device=rows.device)
        operand = _cast(rows, rows.dtype, unscaled, rows=False, columns=True)
        columns: Tensor = operand.columns
        return columns

    @override
    def product(
        self,
        weight: Tensor,
        scales: Scales,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Product:
        def write(rows: Tensor, out: Tensor) -> Tensor:
            # cuBLAS assumes that its output is aligned as torch's own allocations are, and of this dtype (gradients may
            # be in bf16).
            fits = out.dtype is dtype and not out.data_ptr() % 256
            product = torch._scaled_mm(
                rows,
                weight.t(),
                *scales,
                out_dtype=dtype,
                use_fast_accum=FAST_BACKWARD or rows.dtype is E4M3,
                out=out if fits else None,
            )
            if not fits:
                product = out.copy_(product)
            if bias is not None:
                product.add_(bias)
            return product

        return Product(len(weight), dtype, write)

    @override
    def add_weight_gradient(
        self,
        main_grad: Tensor,
        gradient: Tensor,
        inputs: Tensor,
        scales: Scales,
    ) -> None:
        product = self.product(inputs, scales, torch.float32)
        if not self.has_gradient:
            product.write(gradient, main_grad)
        elif not add_product(main_grad, gradient, inputs, scales, fast=FAST_BACKWARD):
            main_grad.add_(product(gradient))
        self.has_gradient = True


def use_fp8(chunks: torch.nn.Module) -> None:
    """Run the linears of all transformer layers of ``chunks`` in fp8; idempotent.

    Raises:
        ConfigError: If there are no such linears.
    """
    linears = []
    for layer in chunks.modules():
        if isinstance(layer, TransformerLayer):
            for module in layer.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    linears.append(module)
    if not linears:
        raise ConfigError(
            "fp8: expected Megatron's parallel linears, got none from model_provider; leave fp8 out"
        )
    for linear in linears:
        if not isinstance(linear._forward_impl, Fp8Linear):
            linear._forward_impl = Fp8Linear(linear)


def fp8_linears(chunks: Iterable[torch.nn.Module]) -> list[Fp8Linear]:
    """All fp8 linears of ``chunks``; none without fp8."""
    linears = []
    for module in torch.nn.ModuleList(chunks).modules():
        product = getattr(module, "_forward_impl", None)
        if isinstance(product, Fp8Linear):
            linears.append(product)
    return linears


@contextlib.contextmanager
def quantized_weights(linears: Iterable[Fp8Linear]) -> Iterator[None]:
    """Context of one step: ``linears`` multiply in fp8, quantize weights once, and write the first weight gradient."""
    for linear in linears:
        linear.is_active = True
        linear.has_gradient = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_active = False
            linear.weight = None


# ---- validation ------------------------------------------------------------------------------------------------------


def known_recipe(recipe: Recipe | None) -> Recipe | None:
    """Return ``recipe`` if it is known.

    Raises:
        ConfigError: If it is not.
    """
    if recipe is not None:
        require_choice("fp8", recipe, get_args(Recipe))
    return recipe
