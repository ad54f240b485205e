"""Copies into the memory of other GPUs instead of collectives: sequence-parallel linears and attention's all-to-all.

Linears (``split_linear.py``) overlap copies with GEMMs.

GPUs of one host write to each other's memory (``torch.distributed._symmetric_memory``) by their copy engines, which
need no multiprocessors; NCCL's kernels take theirs from concurrent GEMMs. Two H200s, 8 layers of Llama-3-8B at tp2,
mb2 x 2, alternating: 239.4 -> 226.4 ms a step, of which 18.4 -> 3.5 ms are exposed communication.

Attention's all-to-all (``context.py``) copies strided heads directly; NCCL's needs them packed before and unpacked
after. Two H200s, a layer of Llama-3-8B at cp2, s8192 mb2, forward and backward: 1.64 -> 0.93 ms.

Rejected: alternating halves of a microbatch (Domino), with NCCL or with copies: no gain. torch's fused products on the
same memory (``fused_all_gather_matmul``) hid a third, and are slower for small matrices.

Sums over two ranks equal NCCL's, with as many roundings; products of half as many rows may round differently.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.rank_zero import rank_zero_warn


@dataclass(frozen=True)
class Product:
    """Matrix product with a fixed right operand, which maps rows [m, k] to [m, width]."""

    width: int
    """Columns of the result."""
    dtype: torch.dtype
    """Dtype of the result."""
    write: Callable[[Tensor, Tensor], object]
    """Writes the product of its first argument, the rows, to its second."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the product into a new tensor."""
        out = rows.new_empty(len(rows), self.width, dtype=self.dtype)
        self.write(rows, out)
        return out


class Collectives:
    """Communication of parallel linears and attention over one group, by NCCL or gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Communicate over ``group``, a tp or cp group."""
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_gather_matmul(
        self,
        x: Tensor,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        """All-gather rows and multiply them; collective over the group.

        Args:
            x: This rank's rows, [rows, k].
            product: Product of the rows.

        Returns:
            All rows, [tp * rows, k], and their product, [tp * rows, n].
        """
        gathered = x.new_empty(self.size * len(x), x.shape[1])
        # As bytes: any dtype, also fp8.
        dist.all_gather_into_tensor(
            gathered.view(torch.uint8),
            x.view(torch.uint8),
            self.group,
        )
        return gathered, product(gathered)

    def matmul_reduce_scatter(
        self,
        x: Tensor,
        product: Product,
        overlap: Callable[[], object] | None = None,
    ) -> Tensor:
        """Multiply rows and reduce-scatter the product; collective over the group.

        Args:
            x: Rows of all ranks, [tp * rows, k].
            product: Product of the rows.
            overlap: Computation to run during the communication.

        Returns:
            Sum of all ranks' products for this rank's rows, [rows, n].
        """
        full = product(x)
        shard = full.new_empty(len(full) // self.size, product.width)
        handle = dist.reduce_scatter_tensor(shard, full, group=self.group, async_op=True)
        if overlap is not None:
            overlap()
        handle.wait()
        return shard

    def all_to_all(
        self,
        *tensors: Tensor,
        split_dim: int,
        concat_dim: int,
    ) -> tuple[Tensor, ...]:
        """Send each rank its chunk along ``split_dim``, and concatenate received chunks along ``concat_dim``.

        Differentiable, and collective over the group.

        Args:
            tensors: Of any strides, and the same shapes on all ranks.
            split_dim: Dimension that the group's size divides.
            concat_dim: Another dimension.
        """
        if len({x.shape[-1] for x in tensors}) > 1:
            # Values may be narrower than queries and keys.
            alone = partial(self.all_to_all, split_dim=split_dim, concat_dim=concat_dim)
            return tuple(alone(x)[0] for x in tensors)
        # One message: the ranks first, then the dimension in which the tensors differ.
        packed = []
        for x in tensors:
            chunks = x.unflatten(split_dim, (self.size, -1))
            packed.append(chunks.movedim(split_dim, 0))
        differing = split_dim + 1
        received = all_to_all(self.group, torch.cat(packed, dim=differing))
        sizes = [x.shape[differing] for x in packed]
        outputs = []
        for part in received.split(sizes, dim=differing):
            chunks = part.movedim(0, concat_dim)
            outputs.append(chunks.flatten(concat_dim, concat_dim + 1))
        return tuple(outputs)


class Window:
    """Memory on each rank of a group into which the other ranks can write, for one message of each at a time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
    ) -> None:
        """Allocate the memory on all ranks; collective over ``group``.

        Args:
            group: Ranks on GPUs of one host.
            num_bytes: Size of the largest message.
            device: Device of this rank.
        """
        # Imported here: only where there are GPUs.
        from torch.distributed import _symmetric_memory as symmetric

        self.num_bytes = num_bytes
        self._size = group.size()
        self._turn = 0
        # Double-buffered: a rank that reaches the next barrier has read the messages of the previous exchange.
        total_bytes = 2 * self._size * num_bytes
        memory = symmetric.empty(total_bytes, dtype=torch.uint8, device=device)
        self._memory = symmetric.rendezvous(memory, group)

    def swap(self) -> None:
        """Switch to the other buffers, for another exchange."""
        self._turn = 1 - self._turn

    def buffer(self, source: int, target: int, like: Tensor) -> Tensor:
        """Buffer on rank ``target`` for the message of rank ``source``, shaped as ``like``."""
        number = self._turn * self._size + source
        offset = number * self.num_bytes // like.element_size()
        buffer: Tensor = self._memory.get_buffer(target, like.shape, like.dtype, offset)
        return buffer

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank has finished all writes before its own barrier."""
        self._memory.barrier()


class PeerCopies(Collectives):
    """Communication by copies; the linears of a chunk, or its attentions, share a window and a side stream."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Communicate over ``group``; memory is allocated for the first message."""
        super().__init__(group)
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._stream: torch.cuda.Stream | None = None
        self._window: Window | None = None

    @override
    def all_gather_matmul(
        self,
        x: Tensor,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        main = torch.cuda.current_stream()
        window, stream = self._prepare(x)
        gathered = x.new_empty(self.size * len(x), x.shape[1])
        products = x.new_empty(len(gathered), product.width, dtype=product.dtype)
        rows = gathered.split(len(x))
        outputs = products.split(len(x))
        started = main.record_event()
        product.write(x, outputs[self.rank])
        stream.wait_event(started)
        with torch.cuda.stream(stream):
            for rank in self._others:
                window.buffer(self.rank, rank, x).copy_(x)
            window.barrier()
            arrived = stream.record_event()
            rows[self.rank].copy_(x)
            for rank in self._others:
                rows[rank].copy_(window.buffer(rank, self.rank, x))
        main.wait_event(arrived)
        for rank in self._others:
            received = window.buffer(rank, self.rank, x)
            product.write(received, outputs[rank])
        main.wait_stream(stream)
        return gathered, products

    @override
    def matmul_reduce_scatter(
        self,
        x: Tensor,
        product: Product,
        overlap: Callable[[], object] | None = None,
    ) -> Tensor:
        rows = x.split(len(x) // self.size)
        total = x.new_empty(len(rows[0]), product.width, dtype=product.dtype)
        main = torch.cuda.current_stream()
        window, stream = self._prepare(total)
        parts = []  # kept alive until they have been sent
        for rank in self._others:
            parts.append(product(rows[rank]))
            stream.wait_event(main.record_event())
            with torch.cuda.stream(stream):
                buffer = window.buffer(self.rank, rank, total)
                buffer.copy_(parts[-1])
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
    def all_to_all(
        self,
        *tensors: Tensor,
        split_dim: int,
        concat_dim: int,
    ) -> tuple[Tensor, ...]:
        copied: tuple[Tensor, ...] = _AllToAll.apply(self, split_dim, concat_dim, *tensors)  # type: ignore[no-untyped-call]
        return copied

    def exchange(
        self,
        tensors: Sequence[Tensor],
        split_dim: int,
        concat_dim: int,
    ) -> list[Tensor]:
        """``all_to_all`` without gradients."""
        sent = [x.chunk(self.size, split_dim) for x in tensors]
        outputs = []
        for chunk, *_ in sent:
            shape = list(chunk.shape)
            shape[concat_dim] *= self.size
            outputs.append(chunk.new_empty(shape))
        received = [x.chunk(self.size, concat_dim) for x in outputs]
        lengths = [chunk.numel() for chunk, *_ in sent]
        message = tensors[0].new_empty(sum(lengths))
        window, _ = self._prepare(message)
        for rank in self._others:
            buffers = window.buffer(self.rank, rank, message).split(lengths)
            for buffer, chunks in zip(buffers, sent, strict=True):
                buffer.view(chunks[rank].shape).copy_(chunks[rank])
        window.barrier()
        for target, source in zip(received, sent, strict=True):
            target[self.rank].copy_(source[self.rank])
        for rank in self._others:
            buffers = window.buffer(rank, self.rank, message).split(lengths)
            for buffer, chunks in zip(buffers, received, strict=True):
                chunks[rank].copy_(buffer.view(chunks[rank].shape))
        return outputs

    def _prepare(self, message: Tensor) -> tuple[Window, torch.cuda.Stream]:
        """Return the window, large enough for ``message``, and the side stream."""
        num_bytes = message.numel() * message.element_size()
        if self._stream is None:
            # High priority, as ranks wait for each other.
            self._stream = torch.cuda.Stream(message.device, priority=-1)
        if self._window is None or self._window.num_bytes < num_bytes:
            torch.cuda.synchronize()  # the previous window may still be read
            self._window = Window(self.group, num_bytes, message.device)
        self._window.swap()
        return self._window, self._stream


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        copies: PeerCopies,
        split_dim: int,
        concat_dim: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.copies = copies
        ctx.split_dim = split_dim
        ctx.concat_dim = concat_dim
        return tuple(copies.exchange(tensors, split_dim, concat_dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_tensors = ctx.copies.exchange(gradients, ctx.concat_dim, ctx.split_dim)
        return None, None, None, *d_tensors


def create_peer_copies(group: dist.ProcessGroup) -> PeerCopies | None:
    """Peer copies for ``group``; None if its ranks cannot write to each other's memory. Collective over ``group``."""
    if dist.get_backend(group) != dist.Backend.NCCL:  # on the CPUs of a host that may have GPUs
        return None
    hosts = gather_objects(socket.gethostname(), group)
    is_supported = len(set(hosts)) == 1
    if is_supported:
        try:
            Window(group, 64, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:
            rank_zero_warn(
                f"peer copies are not supported, ranks communicate by NCCL alone: {error}"
            )
            is_supported = False
    if not all(gather_objects(is_supported, group)):
        return None
    return PeerCopies(group)
