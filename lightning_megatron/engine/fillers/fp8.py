"""Linears of transformer layers in fp8: forward, input gradient and weight gradient by ``torch._scaled_mm``.

One scale per tensor from its largest magnitude at that moment ("tensorwise", current scaling): e4m3 for activations and
weights, e5m2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433). Weight gradients are fp32 and added to
``main_grad``; weights are quantized once a step, for all its microbatches. Embedding, output layer, heads, attention,
norms and what is saved stay as in bf16. Activations are kept in fp8 for the backward pass.

- Under sequence parallelism the bytes that are gathered are fp8, half of bf16's, in both passes: activations before a
  column-parallel linear, which are kept, and gradients before a row-parallel one. All ranks of the tp group take the
  group's largest magnitude first (one all-reduce of a number), so the gathered tensor is exactly the one that one rank
  would make. GPUs of one host copy beside the products (``peer_copies.py``).
- Tensors that are not gathered (weights, activations inside a block) have a scale per shard, which is never coarser.
- Training, validation and test compute so, whatever goes through ``Schedule``; text is generated in bf16.
- Where the first microbatch of a step is, its weight gradient is written, not added: the buffer has just been zeroed.

On an H200, by turns with bf16 in the same run: llama-1b 74,319 instead of 62,406 tokens/s (peak 52.2 instead of 52.9
GiB), 8 layers of Llama-3-8B 49,836 instead of 38,931 (62.2 instead of 60.1: weights in fp8 and transposed).

Rejected: scales per row (measured 0.9 x of bf16 elsewhere, the GEMM is slower), scales of earlier steps (a state that
checkpoints would have to hold), Transformer Engine's layers (other weight names, modules and random streams).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from lightning_megatron.engine.fillers.kernels import reported_gradient, summed_over_ranks
from lightning_megatron.engine.fillers.peer_copies import Exchange, Product
from lightning_megatron.errors import ConfigError, require_choice

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig

Recipe = Literal["tensorwise"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of numbers, which every side of a matrix must be; tokens are filled up with zeros."""
_SMALLEST = 1e-30
"""Instead of an amax of 0, and small enough for any gradient."""

FAST_BACKWARD = True
"""Whether gradients are summed in the tensor cores' own (14-bit) registers, as the forward pass is.

It makes a step 2 % faster, and the products of a Llama-3-8B layer 0.2 to 0.4 % less exact where quantizing costs 6 %.
The loss of 1,000 steps is within the noise of seeds (``python -m benchmarks.convergence``, which sets this).
"""
MEASURED = {2048: 1.22, 4096: 1.31}
"""Steps per second over those of bf16, by hidden size: llama-1b and 8 layers of Llama-3-8B on an H200, torch 2.11."""


# ---- numbers ---------------------------------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """A matrix [m, n] in fp8."""

    rows: Any
    """[m, n]; None where it was not asked for."""
    columns: Any
    """[n, m filled up to 16]: its transpose; likewise."""
    scale: Tensor
    """[1], fp32: by which the numbers are multiplied."""


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Quantized:
    """``x`` as fp8 numbers with one scale.

    Args:
        x: [m, n], contiguous.
        dtype: An fp8 format.
        rows: Whether ``x`` itself is needed.
        columns: Whether its transpose is needed.
        group: Whose parts are to have one scale: one all-reduce; every rank must call. None for this rank alone.
    """
    if x.is_cuda:
        from lightning_megatron.engine.fillers import triton_kernels

        amax = triton_kernels.fp8_amax(x)
    else:
        amax = x.abs().amax().float().reshape(1)
    if group is not None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return _cast(x, dtype, amax, rows, columns)


def _cast(x: Tensor, dtype: torch.dtype, amax: Tensor, rows: bool, columns: bool) -> Quantized:
    m, n = x.shape
    straight = torch.empty((m, n), dtype=dtype, device=x.device) if rows else None
    filled = -(-m // MULTIPLE) * MULTIPLE
    transposed = torch.empty((n, filled), dtype=dtype, device=x.device) if columns else None
    if x.is_cuda:
        from lightning_megatron.engine.fillers import triton_kernels

        return Quantized(straight, transposed, triton_kernels.fp8_cast(x, amax, _SMALLEST, straight, transposed))
    # Two tensors are divided as IEEE says, and as the kernel does; a number by a tensor is not.
    amax, most = amax.clamp(min=_SMALLEST), torch.full_like(amax, torch.finfo(dtype).max)
    numbers = (x.float() * (most / amax)).to(dtype)
    if transposed is not None:
        transposed.zero_()[:, :m] = numbers.t()
    return Quantized(numbers if rows else None, transposed, amax / most)


def _times(weight: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool) -> Product:
    """``rows @ weight.t()``; weight: [n, k], fp8."""

    def write(rows: Tensor, out: Tensor) -> Tensor:
        # cuBLAS takes for granted that what it writes to is aligned as torch's own tensors are.
        where = None if out.data_ptr() % 256 else out
        product = torch._scaled_mm(rows, weight.t(), *scales, out_dtype=dtype, use_fast_accum=fast, out=where)
        return product if where is out else out.copy_(product)

    return Product(len(weight), dtype, write)


class Collectives:
    """What ``Exchange`` does, by NCCL or gloo: gathers before a product, scatters beside what is computed meanwhile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Of a tp group."""
        self.group = group

    def product_of_gathered(self, x: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """As ``Exchange``'s."""
        whole = x.new_empty(self.group.size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole.view(torch.uint8), x.view(torch.uint8), self.group)
        return whole, product(whole)

    def scattered_product(self, x: Tensor, product: Product, meanwhile: Callable[[], object] | None = None) -> Tensor:
        """As ``Exchange``'s."""
        whole = product(x)
        part = whole.new_empty(len(whole) // self.group.size(), product.width)
        handle = dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
        if meanwhile is not None:
            meanwhile()
        handle.wait()
        return part


def _transposed(x: Tensor) -> Tensor:
    """Of fp8 numbers, exactly."""
    unscaled = torch.full((1,), torch.finfo(x.dtype).max, device=x.device)
    columns: Tensor = _cast(x, x.dtype, unscaled, rows=False, columns=True).columns
    return columns


# ---- linears ---------------------------------------------------------------------------------------------------------


class Fp8Linear:
    """Stands where a parallel linear of Megatron's multiplies; outside of ``quantized_weights`` it multiplies in bf16.

    Megatron's row-parallel linear adds up, or scatters, after its product, and gathers bf16 gradients before: here both
    are part of the product. ``explicit_expert_comm`` is Megatron's word for a linear that does not communicate.
    """

    def __init__(self, module: ColumnParallelLinear | RowParallelLinear) -> None:
        """Take over the product of ``module``."""
        self.module = module
        self.native = module._forward_impl
        self.group: dist.ProcessGroup = module.tp_group
        self.exchange: Collectives | Exchange = Collectives(self.group)
        self.is_row = isinstance(module, RowParallelLinear)
        if self.is_row and self.group.size() > 1:
            module.explicit_expert_comm = True
        self.is_active = False
        self.weight: Quantized | None = None
        """Of the running step, once a microbatch has needed it."""
        self.has_gradient = False
        """Whether a microbatch of the running step has left one in ``main_grad``."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, **megatrons: Any) -> Tensor:
        """[s or s/tp, b, in] to [s or s/tp, b, out]; ``megatrons`` further arguments are for its own product."""
        if self.is_active:
            output: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                input, weight, self, torch.is_grad_enabled()
            )
            output = output if bias is None else output + bias
        else:
            output = self.native(input=input, weight=weight, bias=bias, **megatrons)
        has_scattered = self.is_active and self.module.sequence_parallel  # as part of the product
        adds = self.is_row and self.group.size() > 1 and not has_scattered
        return summed_over_ranks(output, self.module) if adds else output

    def quantized_weight(self, columns: bool) -> Quantized:
        """The weight, [out, in], quantized when it is first needed in a step: by then its ranks have gathered it."""
        if self.weight is None or (columns and self.weight.columns is None):
            self.weight = quantize(self.module.weight.detach(), E4M3, columns=columns)
        return self.weight

    def add_weight_gradient(self, gradient: Tensor, inputs: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor | None:
        """Leave ``gradient @ inputs.t()`` in ``main_grad``; returns what autograd wants, as Megatron's linear does.

        Args:
            gradient: [out, tokens], fp8.
            inputs: [in, tokens], fp8.
            scales: Of both.
        """
        weight: Any = self.module.weight
        if not (self.module.gradient_accumulation_fusion and hasattr(weight, "main_grad")):
            return _times(inputs, scales, weight.dtype, FAST_BACKWARD)(gradient)
        main_grad: Tensor = weight.main_grad
        product = _times(inputs, scales, torch.float32, FAST_BACKWARD)
        if self.has_gradient:
            main_grad.add_(product(gradient))
        else:
            product.write(gradient, main_grad)
        self.has_gradient = True
        return reported_gradient(weight)


class _Product(torch.autograd.Function):
    """``input @ weight.t()`` with its gathering before or its scattering after, and what is communicated backwards."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, linear: Fp8Linear, has_backward: bool) -> Tensor:
        is_split = linear.module.sequence_parallel
        ctx.gathers, ctx.scatters = is_split and not linear.is_row, is_split and linear.is_row
        keeps_input = has_backward and ctx.needs_input_grad[1]
        x = quantize(
            input.reshape(-1, input.shape[-1]).contiguous(),
            E4M3,
            columns=keeps_input and not ctx.gathers,
            group=linear.group if ctx.gathers else None,
        )
        quantized = linear.quantized_weight(columns=has_backward or linear.module.training)
        product, kept = _times(quantized.rows, (x.scale, quantized.scale), input.dtype, True), x.columns
        if ctx.gathers:
            kept, output = linear.exchange.product_of_gathered(x.rows, product)
        elif ctx.scatters:
            output = linear.exchange.scattered_product(x.rows, product)
        else:
            output = product(x.rows)
        if has_backward:
            ctx.save_for_backward(kept if keeps_input else None, x.scale, quantized.columns, quantized.scale)
            ctx.linear, ctx.shape = linear, input.shape
        return output.view(-1, *input.shape[1:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        linear: Fp8Linear = ctx.linear
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        of_output = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        group = linear.group if ctx.scatters else None
        dy = quantize(of_output, E5M2, columns=needs_weight and not ctx.scatters, group=group)
        product = _times(weight, (dy.scale, weight_scale), of_output.dtype, FAST_BACKWARD)
        columns = dy.columns
        of_input: Tensor | None
        of_weight: Tensor | None = None

        def make_weight_gradient() -> None:
            nonlocal of_weight
            if needs_weight:
                inputs = _transposed(x) if ctx.gathers else x
                of_weight = linear.add_weight_gradient(columns, inputs, (dy.scale, x_scale))

        if ctx.scatters:
            rows, of_input = linear.exchange.product_of_gathered(dy.rows, product)
            columns = _transposed(rows) if needs_weight else None
            make_weight_gradient()
        elif ctx.gathers and needs_input:
            of_input = linear.exchange.scattered_product(dy.rows, product, make_weight_gradient)
        else:
            of_input, handle = product(dy.rows) if needs_input else None, None
            if of_input is not None and not linear.is_row and linear.module.allreduce_dgrad:
                handle = dist.all_reduce(of_input, group=linear.group, async_op=True)
            make_weight_gradient()
            if handle is not None:
                handle.wait()
        return of_input if of_input is None else of_input.view(ctx.shape), of_weight, None, None


def use_fp8(chunks: torch.nn.Module) -> None:
    """Let the linears of all transformer layers of ``chunks`` multiply in fp8; nothing happens a second time.

    Raises:
        ConfigError: If there are none.
    """
    layers = [layer for layer in chunks.modules() if isinstance(layer, TransformerLayer)]
    kinds = (ColumnParallelLinear, RowParallelLinear)
    linears = [each for layer in layers for each in layer.modules() if isinstance(each, kinds)]
    if not linears:
        raise ConfigError("fp8: expected Megatron's parallel linears, got none from model_provider; leave fp8 out")
    for linear in linears:
        if not isinstance(linear._forward_impl, Fp8Linear):
            linear._forward_impl = Fp8Linear(linear)


def fp8_linears(chunks: Iterable[torch.nn.Module]) -> list[Fp8Linear]:
    """All of ``chunks``; none without fp8."""
    linears = (getattr(module, "_forward_impl", None) for chunk in chunks for module in chunk.modules())
    return [linear for linear in linears if isinstance(linear, Fp8Linear)]


@contextlib.contextmanager
def quantized_weights(linears: Iterable[Fp8Linear]) -> Iterator[None]:
    """While active, ``linears`` multiply in fp8, and weights and gradient buffers are those of one step."""
    for linear in linears:
        linear.is_active, linear.has_gradient = True, False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_active, linear.weight = False, None


# ---- what can be combined --------------------------------------------------------------------------------------------


def known_recipe(recipe: Recipe | None) -> Recipe | None:
    """``recipe``, if there is one of that name.

    Raises:
        ConfigError: If there is none.
    """
    if recipe is not None:
        require_choice("fp8", recipe, get_args(Recipe))
    return recipe


def size_warning(model: ModelConfig) -> str | None:
    """What to tell whoever trains a model narrower than those that fp8 was measured with; None of others."""
    least = min(MEASURED)
    if model.hidden_size >= least:
        return None
    figures = ", ".join(f"{gain} x the speed of bf16 at {size}" for size, gain in MEASURED.items())
    return (
        f"fp8: hidden_size={model.hidden_size} is below {least}, from where on it was measured to pay ({figures}, on "
        "an H200); compare a few steps with and without"
    )


def check_fp8(model: ModelConfig, tp: int, params_dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless the linears of ``model`` can be multiplied in fp8.

    Raises:
        ConfigError: If the run is not in bf16, the GPU has no fp8, or a side of a matrix is not a multiple of 16.
    """
    if params_dtype is not torch.bfloat16:
        name = str(params_dtype).removeprefix("torch.")
        raise ConfigError(f"fp8: expected precision='bf16-mixed', got weights in {name}; set Trainer(precision=)")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigError(
            f"fp8: expected a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), got "
            f"{torch.cuda.get_device_name(device)} with {'.'.join(map(str, capability))}; leave fp8 out"
        )
    queries, groups = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    sides = {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size / tp": model.ffn_hidden_size / tp,
        "num_attention_heads * kv_channels / tp": queries / tp,
        "(num_attention_heads + 2 * num_query_groups) * kv_channels / tp": (queries + 2 * groups) / tp,
    }
    for name, side in sides.items():
        if side % MULTIPLE:
            raise ConfigError(f"fp8: expected {name} to be a multiple of {MULTIPLE}, got {side:g}; choose another")
