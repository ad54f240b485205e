"""Copies into other ranks' memory instead of collectives: linears under sequence parallelism, heads for tokens.

Linears copy beside their products. A product whose rows are gathered first begins with the rows that are here, while
those of others come; one whose rows are summed and scattered first makes the rows of others, which travel while it
makes its own. Going back, what a column-parallel linear scatters travels beside the weight gradient, and what it
gathered has been kept, so that it is not gathered again: s * b * h numbers for each of two linears of a layer instead
of a tp-th of them.

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
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from lightning_megatron.engine.fillers.kernels import accumulate_weight_gradient, reported_gradient, summed_over_ranks


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

    def next(self) -> None:
        """Begin with another exchange."""
        self._turn = 1 - self._turn

    def place(self, of: int, on: int, like: Tensor) -> Tensor:
        """Where rank ``of``'s message is on rank ``on``, shaped as ``like``."""
        offset = (self._turn * self._size + of) * self.num_bytes // like.element_size()
        found: Tensor = self._memory.get_buffer(on, like.shape, like.dtype, offset)
        return found

    def meet(self) -> None:
        """Wait, on the current stream, until every rank has written all that it had to before it came here."""
        self._memory.barrier()


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


class Exchange:
    """What the linears of a chunk, or its attentions, share: a window, and the stream for copies beside products."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Nothing is allocated before the first message."""
        self.rank, self.size, self._group = group.rank(), group.size(), group
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._stream: torch.cuda.Stream | None = None
        self._window: Window | None = None

    def product_of_gathered(self, x: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Gather rows and multiply all of them.

        Args:
            x: [rows, k]: this rank's.
            product: Of rows.

        Returns:
            All rows, [tp * rows, k], and their product, [tp * rows, n].
        """
        main, window, stream = torch.cuda.current_stream(), *self._begin(x)
        whole = x.new_empty(self.size * len(x), x.shape[1])
        products = x.new_empty(len(whole), product.width, dtype=product.dtype)
        of_rank, rows = products.split(len(x)), whole.split(len(x))
        began = main.record_event()
        product.write(x, of_rank[self.rank])
        stream.wait_event(began)
        with torch.cuda.stream(stream):
            for rank in self._others:
                window.place(self.rank, rank, x).copy_(x)
            window.meet()
            arrived = stream.record_event()
            for rank in range(self.size):
                rows[rank].copy_(x if rank == self.rank else window.place(rank, self.rank, x))
        main.wait_event(arrived)
        for rank in self._others:
            product.write(window.place(rank, self.rank, x), of_rank[rank])
        main.wait_stream(stream)
        return whole, products

    def scattered_product(self, x: Tensor, product: Product, meanwhile: Callable[[], object] | None = None) -> Tensor:
        """Multiply and give each rank the sum of all ranks' products of its rows.

        Args:
            x: [tp * rows, k]: rows of all ranks.
            product: Of rows.
            meanwhile: What else is to be computed.

        Returns:
            [rows, n].
        """
        rows = x.split(len(x) // self.size)
        total = x.new_empty(len(rows[0]), product.width, dtype=product.dtype)
        main, window, stream = torch.cuda.current_stream(), *self._begin(total)
        parts = []  # kept until they have been sent
        for rank in self._others:
            parts.append(product(rows[rank]))
            stream.wait_event(main.record_event())
            with torch.cuda.stream(stream):
                window.place(self.rank, rank, total).copy_(parts[-1])
        product.write(rows[self.rank], total)
        with torch.cuda.stream(stream):
            window.meet()
        if meanwhile is not None:
            meanwhile()
        main.wait_stream(stream)
        for rank in self._others:
            total.add_(window.place(rank, self.rank, total))
        return total

    def all_to_all(self, *tensors: Tensor, cut: int, joined: int) -> tuple[Tensor, ...]:
        """Give each rank its part of each tensor along ``cut``, and join along ``joined`` the parts that ranks give.

        Args:
            tensors: In any strides; of the same shapes on all ranks. They get gradients, by the opposite way.
            cut: An axis that the group's size divides.
            joined: Another axis.
        """
        copied: tuple[Tensor, ...] = _AllToAll.apply(self, cut, joined, *tensors)  # type: ignore[no-untyped-call]
        return copied

    def _copied(self, tensors: Sequence[Tensor], cut: int, joined: int) -> list[Tensor]:
        sent = [x.chunk(self.size, cut) for x in tensors]
        whole = [
            x.new_empty([n * (1 + (d == joined) * (self.size - 1)) for d, n in enumerate(x.shape)]) for x, *_ in sent
        ]
        received = [x.chunk(self.size, joined) for x in whole]
        lengths = [x.numel() for x, *_ in sent]
        message = tensors[0].new_empty(sum(lengths))
        window, _ = self._begin(message)
        for rank in self._others:
            for place, parts in zip(window.place(self.rank, rank, message).split(lengths), sent, strict=True):
                place.view(parts[rank].shape).copy_(parts[rank])
        window.meet()
        for theirs, ours in zip(received, sent, strict=True):
            theirs[self.rank].copy_(ours[self.rank])
        for rank in self._others:
            for place, parts in zip(window.place(rank, self.rank, message).split(lengths), received, strict=True):
                parts[rank].copy_(place.view(parts[rank].shape))
        return whole

    def _begin(self, message: Tensor) -> tuple[Window, torch.cuda.Stream]:
        """For messages of that size."""
        num_bytes = message.numel() * message.element_size()
        if self._stream is None:
            self._stream = torch.cuda.Stream(message.device, priority=-1)  # before others: the ranks meet soon
        if self._window is None or self._window.num_bytes < num_bytes:
            torch.cuda.synchronize()  # the former one may still be read
            self._window = Window(self._group, num_bytes, message.device)
        self._window.next()
        return self._window, self._stream


def _times(weight: Tensor, bias: Tensor | None = None) -> Product:
    """``rows @ weight + bias``; weight: [k, n]."""

    def write(rows: Tensor, out: Tensor) -> Tensor:
        return torch.mm(rows, weight, out=out) if bias is None else torch.addmm(bias, rows, weight, out=out)

    return Product(weight.shape[1], weight.dtype, write)


class PeerLinear:
    """Stands where a parallel linear of Megatron's multiplies, while it is trained; else it communicates as ever.

    ``explicit_expert_comm`` is Megatron's word for a linear that does not communicate.
    """

    def __init__(self, module: Any, exchange: Exchange) -> None:
        """Take over the product of ``module``."""
        self.module, self.exchange, self.native = module, exchange, module._forward_impl
        self.is_row = isinstance(module, RowParallelLinear)
        if self.is_row:
            module.explicit_expert_comm = True

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, **megatrons: Any) -> Tensor:
        """[s or s/tp, b, in] to [s or s/tp, b, out]; ``megatrons`` further arguments are for its own product."""
        if self.module.training and torch.is_grad_enabled():
            product = _RowProduct if self.is_row else _ColumnProduct
            rows: Tensor = product.apply(input.flatten(0, 1), weight, bias, self)  # type: ignore[no-untyped-call]
            return rows.view(-1, *input.shape[1:-1], rows.shape[-1])
        output: Tensor = self.native(input=input, weight=weight, bias=bias, **megatrons)
        return summed_over_ranks(output, self.module) if self.is_row else output

    def weight_gradient(self, weight: Any, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """What autograd wants for ``gradient.t() @ inputs``, which is added to ``main_grad`` if there is one."""
        if self.module.gradient_accumulation_fusion and hasattr(weight, "main_grad"):
            accumulate_weight_gradient(inputs, gradient, weight.main_grad)
            return reported_gradient(weight)
        return gradient.t() @ inputs


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, linear: PeerLinear) -> Tensor:
        whole, product = linear.exchange.product_of_gathered(input, _times(weight.t(), bias))
        ctx.save_for_backward(whole if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.linear = weight, linear
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        (inputs,) = ctx.saved_tensors
        found: list[Tensor | None] = [None, None]

        def of_parameters() -> None:
            if ctx.needs_input_grad[1]:
                found[0] = ctx.linear.weight_gradient(ctx.weight, inputs, gradient)
            if ctx.needs_input_grad[2]:
                found[1] = gradient.sum(0)

        of_input = ctx.linear.exchange.scattered_product(gradient, _times(ctx.weight), of_parameters)
        return of_input, *found, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: None, linear: PeerLinear) -> Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.linear = weight, linear
        return linear.exchange.scattered_product(input, _times(weight.t()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        whole, of_input = ctx.linear.exchange.product_of_gathered(gradients[0].contiguous(), _times(ctx.weight))
        of_weight = ctx.linear.weight_gradient(ctx.weight, inputs, whole) if ctx.needs_input_grad[1] else None
        return of_input, of_weight, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.cut, ctx.joined = exchange, cut, joined
        return tuple(exchange._copied(tensors, cut, joined))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.exchange._copied(gradients, ctx.joined, ctx.cut)


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """For ranks that can write to each other's memory; each of them must call."""
    return Exchange(group) if share_memory(group) else None


def use_for_linears(chunks: Iterable[torch.nn.Module]) -> None:
    """Let linears that gather or scatter rows copy them, if ranks can; every rank must call. Those of experts stay."""
    exchanges: dict[dist.ProcessGroup, Exchange | None] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or not module.sequence_parallel:
            continue
        stands_in: Any = vars(module).get("_forward_impl")  # a PeerLinear of an earlier fit, or an Fp8Linear
        if stands_in is None and module.explicit_expert_comm:
            continue
        if module.tp_group not in exchanges:
            exchanges[module.tp_group] = exchange_of(module.tp_group)
        if (exchange := exchanges[module.tp_group]) is None:
            continue
        if stands_in is None:
            module._forward_impl = PeerLinear(module, exchange)
        else:
            stands_in.exchange = exchange


def share_memory(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of ``group`` can write to each other's memory; each of them must call."""
    if not torch.cuda.is_available():
        return False
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
    return all(answers)
