"""Copies into other ranks' memory instead of collectives: linears under sequence parallelism, heads for tokens.

Linears (``SplitLinear``, to which ``fp8.py`` gives other numbers) copy beside their products. A product whose rows are
gathered first begins with the rows that are here, while those of others come; one whose rows are summed and scattered
first makes the rows of others, which travel while it makes its own. Going back, what a column-parallel linear scatters
travels beside the weight gradient, and what it gathered has been kept, so that it is not gathered again: s * b * h
numbers for each of two linears of a layer instead of a tp-th of them.

GPUs of one host write to each other's memory (``torch.distributed._symmetric_memory``) by their copy engines, which
need no multiprocessor; NCCL's kernels take theirs from the products beside them. Two H200s, 8 layers of Llama-3-8B at
tp2, mb2 x 2, by turns: 239.4 -> 226.4 ms a step, of which 18.4 -> 3.5 ms are communication beside which nothing runs.

Attention's heads for tokens (``context.py``) are written where they belong; NCCL's all-to-all wants them packed before
and unpacked after. Two H200s, a layer of Llama-3-8B at cp2, s8192 mb2, forward and backward: 1.64 -> 0.93 ms.

Rejected: two halves of a microbatch in turn (Domino), with NCCL or with copies: no gain. torch's fused products of the
same memory (``fused_all_gather_matmul``) hid a third, and lose where matrices are small.

Sums of two ranks are those of NCCL, rounded as often; products of half as many rows may round otherwise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.fillers.kernels import accumulate_weight_gradient, reported_gradient, summed_over_ranks


@dataclass(frozen=True)
class Product:
    """What rows [m, k] become: [m, width]."""

    width: int
    """Columns of the result."""
    dtype: torch.dtype
    """Of the result."""
    write: Callable[[Tensor, Tensor], object]
    """From rows to where their product belongs."""

    def __call__(self, rows: Tensor) -> Tensor:
        """The product in memory of its own."""
        out = rows.new_empty(len(rows), self.width, dtype=self.dtype)
        self.write(rows, out)
        return out


class Collectives:
    """What linears and attentions do with the parts of a group's ranks, by NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Of a tp or cp group."""
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_gather_matmul(self, x: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Gather rows and multiply all of them.

        Args:
            x: [rows, k]: this rank's.
            product: Of rows.

        Returns:
            All rows, [tp * rows, k], and their product, [tp * rows, n].
        """
        whole = x.new_empty(self.size * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole.view(torch.uint8), x.view(torch.uint8), self.group)  # of fp8 numbers, too
        return whole, product(whole)

    def matmul_reduce_scatter(self, x: Tensor, product: Product, overlap: Callable[[], object] | None = None) -> Tensor:
        """Multiply and give each rank the sum of all ranks' products of its rows.

        Args:
            x: [tp * rows, k]: rows of all ranks.
            product: Of rows.
            overlap: Computation to run during the communication.

        Returns:
            [rows, n].
        """
        whole = product(x)
        part = whole.new_empty(len(whole) // self.size, product.width)
        handle = dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
        if overlap is not None:
            overlap()
        handle.wait()
        return part

    def all_to_all(self, *tensors: Tensor, split_dim: int, concat_dim: int) -> tuple[Tensor, ...]:
        """Split each tensor along ``split_dim`` over the ranks and concatenate what is received along ``concat_dim``.

        Args:
            tensors: In any strides; of the same shapes on all ranks. They get gradients, by the opposite way.
            split_dim: An axis that the group's size divides.
            concat_dim: Another axis.
        """
        # One message: the ranks first, then the dimension in which the tensors differ.
        packed = [x.unflatten(split_dim, (self.size, -1)).movedim(split_dim, 0) for x in tensors]
        received = all_to_all(self.group, torch.cat(packed, dim=split_dim + 1))
        parts = torch.split(received, [x.shape[split_dim + 1] for x in packed], dim=split_dim + 1)
        return tuple(part.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1) for part in parts)


class Window:
    """Memory on each rank of a group into which each other rank can write, for one message of each at a time."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        """Every rank of ``group`` must call.

        Args:
            group: GPUs of one host.
            num_bytes: Of the largest message.
            device: This rank's.
        """
        from torch.distributed import _symmetric_memory as symmetric  # only where there are GPUs

        # Two places for each message, used in turn: who meets the others once more has read what was there before.
        self._memory = symmetric.rendezvous(
            symmetric.empty(2 * group.size() * num_bytes, dtype=torch.uint8, device=device), group
        )
        self.num_bytes, self._size, self._turn = num_bytes, group.size(), 0

    def swap(self) -> None:
        """Switch to the other half of the memory, for another exchange."""
        self._turn = 1 - self._turn

    def buffer(self, source: int, target: int, like: Tensor) -> Tensor:
        """Buffer on rank ``target`` for the message of rank ``source``, shaped as ``like``."""
        offset = (self._turn * self._size + source) * self.num_bytes // like.element_size()
        found: Tensor = self._memory.get_buffer(target, like.shape, like.dtype, offset)
        return found

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank has finished the writes it enqueued before its own barrier."""
        self._memory.barrier()


class PeerCopies(Collectives):
    """The same by copies; linears of a chunk, or its attentions, share a window and the stream beside products."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Nothing is allocated before the first message."""
        super().__init__(group)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._stream: torch.cuda.Stream | None = None
        self._window: Window | None = None

    @override
    def all_gather_matmul(self, x: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        main, window, stream = torch.cuda.current_stream(), *self._begin(x)
        whole = x.new_empty(self.size * len(x), x.shape[1])
        products = x.new_empty(len(whole), product.width, dtype=product.dtype)
        of_rank, rows = products.split(len(x)), whole.split(len(x))
        began = main.record_event()
        product.write(x, of_rank[self.rank])
        stream.wait_event(began)
        with torch.cuda.stream(stream):
            for rank in self._others:
                window.buffer(self.rank, rank, x).copy_(x)
            window.barrier()
            arrived = stream.record_event()
            for rank in range(self.size):
                rows[rank].copy_(x if rank == self.rank else window.buffer(rank, self.rank, x))
        main.wait_event(arrived)
        for rank in self._others:
            product.write(window.buffer(rank, self.rank, x), of_rank[rank])
        main.wait_stream(stream)
        return whole, products

    @override
    def matmul_reduce_scatter(self, x: Tensor, product: Product, overlap: Callable[[], object] | None = None) -> Tensor:
        rows = x.split(len(x) // self.size)
        total = x.new_empty(len(rows[0]), product.width, dtype=product.dtype)
        main, window, stream = torch.cuda.current_stream(), *self._begin(total)
        parts = []  # kept until they have been sent
        for rank in self._others:
            parts.append(product(rows[rank]))
            stream.wait_event(main.record_event())
            with torch.cuda.stream(stream):
                window.buffer(self.rank, rank, total).copy_(parts[-1])
        product.write(rows[self.rank], total)
        with torch.cuda.stream(stream):
            window.barrier()
        if overlap is not None:
            overlap()
        main.wait_stream(stream)
        for rank in self._others:
            total.add_(window.buffer(rank, self.rank, total))
        return total

    @override
    def all_to_all(self, *tensors: Tensor, split_dim: int, concat_dim: int) -> tuple[Tensor, ...]:
        copied: tuple[Tensor, ...] = _AllToAll.apply(self, split_dim, concat_dim, *tensors)  # type: ignore[no-untyped-call]
        return copied

    def _exchange(self, tensors: Sequence[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
        sent = [x.chunk(self.size, split_dim) for x in tensors]
        outputs = [
            x.new_empty([n * self.size if d == concat_dim else n for d, n in enumerate(x.shape)]) for x, *_ in sent
        ]
        received = [x.chunk(self.size, concat_dim) for x in outputs]
        lengths = [x.numel() for x, *_ in sent]
        message = tensors[0].new_empty(sum(lengths))
        window, _ = self._begin(message)
        for rank in self._others:
            for place, parts in zip(window.buffer(self.rank, rank, message).split(lengths), sent, strict=True):
                place.view(parts[rank].shape).copy_(parts[rank])
        window.barrier()
        for theirs, ours in zip(received, sent, strict=True):
            theirs[self.rank].copy_(ours[self.rank])
        for rank in self._others:
            for place, parts in zip(window.buffer(rank, self.rank, message).split(lengths), received, strict=True):
                parts[rank].copy_(place.view(parts[rank].shape))
        return outputs

    def _begin(self, message: Tensor) -> tuple[Window, torch.cuda.Stream]:
        """For messages of that size."""
        num_bytes = message.numel() * message.element_size()
        if self._stream is None:
            self._stream = torch.cuda.Stream(message.device, priority=-1)  # before others: the ranks meet soon
        if self._window is None or self._window.num_bytes < num_bytes:
            torch.cuda.synchronize()  # the former one may still be read
            self._window = Window(self.group, num_bytes, message.device)
        self._window.swap()
        return self._window, self._stream


class Operand(NamedTuple):
    """A matrix [m, n] as products read it."""

    rows: Any
    """[m, n]; None where it was not asked for."""
    columns: Any
    """Its transpose, [n, m], of fp8 numbers [n, m filled up to 16]; likewise."""
    scale: Any
    """[1], fp32: by which fp8 numbers are multiplied; None of others."""


Scales = tuple[Any, Any]
"""Of both operands of a product."""


class SplitLinear:
    """Stands where a parallel linear of Megatron's multiplies, while it is trained; else it communicates as ever.

    Megatron's row-parallel linear adds up, or scatters, after its product, and gathers gradients before: here both are
    part of the product. ``explicit_expert_comm`` is Megatron's word for a linear that does not communicate.
    """

    def __init__(self, module: Any, exchange: Collectives) -> None:
        """Take over the product of ``module``."""
        self.module, self.exchange, self.native = module, exchange, module._forward_impl
        self.is_row = isinstance(module, RowParallelLinear)
        if self.is_row and exchange.size > 1:
            module.explicit_expert_comm = True

    @property
    def is_active(self) -> bool:
        """Whether the product is this one's, not Megatron's."""
        return bool(self.module.training) and torch.is_grad_enabled()

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, **megatrons: Any) -> Tensor:
        """[s or s/tp, b, in] to [s or s/tp, b, out]; ``megatrons`` further arguments are for its own product."""
        output: Tensor
        if self.is_active:
            output = _LinearProduct.apply(  # type: ignore[no-untyped-call]
                input.flatten(0, -2), weight, bias, self, torch.is_grad_enabled()
            )
            # Not in the function, whose output the models may overwrite.
            output = output.view(-1, *input.shape[1:-1], output.shape[-1])
        else:
            output = self.native(input=input, weight=weight, bias=bias, **megatrons)
        has_scattered = self.is_active and self.module.sequence_parallel  # as part of the product
        adds = self.is_row and self.exchange.size > 1 and not has_scattered
        return summed_over_ranks(output, self.module) if adds else output

    # ---- numbers: here as they are, in fp8.py quantized ----

    def operand(self, x: Tensor, *, columns: bool, is_gathered: bool, is_gradient: bool = False) -> Operand:
        """Inputs or gradients, [tokens, n].

        Args:
            x: This rank's.
            columns: Whether their transpose is needed.
            is_gathered: Whether the group's rows are to become one matrix; then every rank calls.
            is_gradient: Of outputs.
        """
        return Operand(x, x.t(), None)

    def weight_operand(self, weight: Tensor, *, columns: bool) -> Operand:
        """The weight, [out, in]."""
        return Operand(weight, weight.t(), None)

    def transposed(self, rows: Tensor) -> Tensor:
        """``columns`` of what was gathered."""
        return rows.t()

    def product(self, weight: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None) -> Product:
        """``rows @ weight.t() + bias`` in ``dtype``; weight: [n, k]."""

        def write(rows: Tensor, out: Tensor) -> Tensor:
            product = torch.mm if bias is None else partial(torch.addmm, bias)
            return product(rows, weight.t(), out=out)

        return Product(len(weight), dtype, write)

    def add_weight_gradient(self, main_grad: Tensor, gradient: Tensor, inputs: Tensor, scales: Scales) -> None:
        """Add ``gradient @ inputs.t()``; gradient: [out, tokens], inputs: [in, tokens], main_grad: [out, in]."""
        accumulate_weight_gradient(inputs.t(), gradient.t(), main_grad)

    def weight_gradient(self, weight: Any, gradient: Tensor, inputs: Tensor, scales: Scales) -> Tensor | None:
        """What autograd wants for ``gradient @ inputs.t()``, which is added to ``main_grad`` if there is one."""
        if not (self.module.gradient_accumulation_fusion and hasattr(weight, "main_grad")):
            return self.product(inputs, scales, weight.dtype)(gradient)
        self.add_weight_gradient(weight.main_grad, gradient, inputs, scales)
        return reported_gradient(weight)


class _LinearProduct(torch.autograd.Function):
    """``rows @ weight.t() + bias`` with its gathering before or its scattering after, and what goes back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, linear: SplitLinear, has_backward: bool
    ) -> Tensor:
        is_split = linear.module.sequence_parallel
        ctx.gathers, ctx.scatters = is_split and not linear.is_row, is_split and linear.is_row
        keeps_input = has_backward and ctx.needs_input_grad[1]
        x = linear.operand(rows, columns=keeps_input and not ctx.gathers, is_gathered=ctx.gathers)
        taken = linear.weight_operand(weight, columns=has_backward or linear.module.training)
        product, kept = linear.product(taken.rows, (x.scale, taken.scale), rows.dtype, bias), x.columns
        if ctx.gathers:
            kept, output = linear.exchange.all_gather_matmul(x.rows, product)
        elif ctx.scatters:
            output = linear.exchange.matmul_reduce_scatter(x.rows, product)
        else:
            output = product(x.rows)
        if has_backward:
            ctx.save_for_backward(kept if keeps_input else None, x.scale, taken.columns, taken.scale)
            ctx.linear, ctx.weight = linear, weight
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        linear: SplitLinear = ctx.linear
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = gradients[0].contiguous()
        columns = needs_weight and not ctx.scatters
        dy = linear.operand(rows, columns=columns, is_gathered=ctx.scatters, is_gradient=True)
        product = linear.product(weight, (dy.scale, weight_scale), rows.dtype)
        of_input: Tensor | None
        of_parameters: list[Tensor | None] = [None, None]

        def differentiate_parameters(columns: Tensor = dy.columns) -> None:
            if needs_weight:
                inputs = linear.transposed(x) if ctx.gathers else x
                of_parameters[0] = linear.weight_gradient(ctx.weight, columns, inputs, (dy.scale, x_scale))
            if needs_bias:
                of_parameters[1] = rows.sum(0)

        if ctx.scatters:
            whole, of_input = linear.exchange.all_gather_matmul(dy.rows, product)
            if needs_weight:
                differentiate_parameters(linear.transposed(whole))
        elif ctx.gathers and needs_input:
            of_input = linear.exchange.matmul_reduce_scatter(dy.rows, product, differentiate_parameters)
        else:
            of_input, handle = product(dy.rows) if needs_input else None, None
            if of_input is not None and not linear.is_row and linear.module.allreduce_dgrad:
                handle = dist.all_reduce(of_input, group=linear.exchange.group, async_op=True)
            differentiate_parameters()
            if handle is not None:
                handle.wait()
        return of_input, *of_parameters, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: PeerCopies, split_dim: int, concat_dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.split_dim, ctx.concat_dim = copies, split_dim, concat_dim
        return tuple(copies._exchange(tensors, split_dim, concat_dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.copies._exchange(gradients, ctx.concat_dim, ctx.split_dim)


def use_for_linears(chunks: Iterable[torch.nn.Module]) -> None:
    """Let linears that gather or scatter rows copy them, if ranks can; every rank must call. Those of experts stay."""
    exchanges: dict[dist.ProcessGroup, PeerCopies | None] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or not module.sequence_parallel:
            continue
        stands_in: Any = vars(module).get("_forward_impl")  # a SplitLinear of an earlier fit, or an Fp8Linear
        if stands_in is None and module.explicit_expert_comm:
            continue
        if module.tp_group not in exchanges:
            exchanges[module.tp_group] = create_peer_copies(module.tp_group)
        if (exchange := exchanges[module.tp_group]) is not None:
            module._forward_impl = stands_in = stands_in or SplitLinear(module, exchange)
            stands_in.exchange = exchange


def create_peer_copies(group: dist.ProcessGroup) -> PeerCopies | None:
    """For ranks that can write to each other's memory; each of them must call."""
    if not torch.cuda.is_available():
        return None
    hosts = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    can = len(set(hosts)) == 1
    if can:
        try:
            Window(group, 64, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:
            rank_zero_warn(f"tensor-parallel ranks communicate by NCCL alone: {error}")
            can = False
    answers = [can] * group.size()
    dist.all_gather_object(answers, can, group=group)
    return PeerCopies(group) if all(answers) else None
