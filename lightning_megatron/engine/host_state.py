"""The optimizer's state in host memory: fp32 master weights and moments, which pass through the device for an update.

Source: Ren et al. 2021 (ZeRO-Offload, https://arxiv.org/abs/2101.06840) keep the state in host memory and update it
there. Here the update stays on the GPU: a bucket is copied in while the bucket before it is updated and the one before
that is copied back, on a stream for each direction, so that an update takes as long as one direction of the bus. The
host queues all of it ahead, so the first buckets come in during the backward pass, and the last ones go back during the
next forward pass. Kernels and gradients are those of a run without: the result is equal bit for bit.

A master weight is still a tensor on the device for Megatron, which gives it a gradient there; but one without memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.engine.bucket_plan import Arrays, Bucket, cut, lay_out
from lightning_megatron.engine.pinned_memory import PinnedBlock

MASTER = "param"
"""Name of the array of master weights; those of moments have the names of the optimizer's state."""
BUCKET_ELEMENTS = 2**23
"""Elements of a bucket of parameters that are updated element by element: 96 MiB with two moments."""
_NUM_SLOTS = 4
_NUM_LARGE_SLOTS = 2
_LARGE_SLOT = 2**28
"""Bytes from which there are only two slots: one is copied in while the other is updated and copied back."""
_BYTES = 4


def num_slots(slot_bytes: float) -> int:
    """How many slots there are of a size: with fewer, a copy sometimes waits for another."""
    return _NUM_SLOTS if slot_bytes < _LARGE_SLOT else _NUM_LARGE_SLOTS


class OffloadedMaster(NamedTuple):
    """A parameter of the optimizer whose state is in host memory."""

    master: Tensor
    """The parameter, with its gradient: a placeholder, or a weight in fp32."""
    low: Tensor | None
    """[elements], 16 bits, on the device: the weights that it is the master of; None if it is the weight."""
    moments: tuple[str, ...]
    """Names of its moments."""

    @property
    def names(self) -> tuple[str, ...]:
        """Arrays that have it."""
        return self.moments if self.low is None else (MASTER, *self.moments)


class StagedPiece(NamedTuple):
    """Consecutive elements of a parameter, on the device during their update; each tensor is [elements]."""

    master: Tensor
    start: int
    stop: int
    weights: Tensor
    """fp32 master weights."""
    moments: Mapping[str, Tensor]
    low: Tensor | None
    """16-bit weights; None if the masters are the weights."""

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of these elements; None if the parameter has none."""
        gradient = self.master.grad
        return None if gradient is None else gradient.view(-1)[self.start : self.stop]


class Pipeline:
    """Copies to the device, work on it, and copies back, each on its own stream and on several slots in turn."""

    def __init__(self, num_slots: int) -> None:
        """Create the streams of the copies; work is on the current stream."""
        self._num_slots = num_slots
        self._inward = torch.cuda.Stream()
        self._outward = torch.cuda.Stream()
        # Kernels that are queued may still use the memory that the slots have got.
        self._inward.wait_stream(torch.cuda.current_stream())
        self._freed: list[Any] = [None] * num_slots
        """Of each slot: event after which it is copied back."""

    def run(
        self,
        num_buckets: int,
        load: Callable[[int, int], None],
        store: Callable[[int, int], None],
    ) -> Iterator[tuple[int, int]]:
        """Yield each bucket and its slot when work on it can be queued, and queue its way back afterwards.

        A bucket has the same slot in each call. So the slot is free when the bucket's own last way back has ended, and
        it comes in again as it has left.

        Args:
            num_buckets: How many there are.
            load: Queues the copy of a bucket into a slot.
            store: Queues its copy back.
        """
        work = torch.cuda.current_stream()
        for bucket in range(num_buckets):
            slot = bucket % self._num_slots
            if self._freed[slot] is not None:
                self._inward.wait_event(self._freed[slot])
            with torch.cuda.stream(self._inward):
                load(bucket, slot)
            work.wait_event(self._inward.record_event())
            yield bucket, slot
            self._outward.wait_event(work.record_event())
            with torch.cuda.stream(self._outward):
                store(bucket, slot)
            self._freed[slot] = self._outward.record_event()

    def let_stream_wait(self) -> None:
        """Let the current stream wait for all copies back."""
        torch.cuda.current_stream().wait_stream(self._outward)

    def wait(self) -> None:
        """Let the host wait for all copies back."""
        for event in self._freed:
            if event is not None:
                event.synchronize()


class Staging:
    """Slots on the device, which all of Megatron's optimizers use in turn."""

    def __init__(self, slot_size: int, device: torch.device) -> None:
        """Allocate the slots.

        Args:
            slot_size: Elements of a slot, fp32.
            device: Where the update runs.
        """
        self.num_slots = num_slots(slot_size * _BYTES)
        self.slots = [
            torch.empty(slot_size, dtype=torch.float32, device=device)
            for _ in range(self.num_slots)
        ]
        self.pipeline = Pipeline(self.num_slots)


class HostState:
    """State of one of Megatron's optimizers in host memory: that of the parameters given, which have none elsewhere."""

    def __init__(
        self,
        elementwise: Sequence[OffloadedMaster],
        rounds: Sequence[Sequence[OffloadedMaster]],
        device: torch.device,
    ) -> None:
        """Allocate the state: moments of zeros, and the master weights of the present 16-bit weights.

        Args:
            elementwise: Parameters that are updated element by element, in the order of their update.
            rounds: Parameters that are updated together, as whole matrices, by rounds; a round may have none.
            device: Where the update runs.
        """
        self._device = device
        self._masters = [*elementwise, *(each for of_round in rounds for each in of_round)]
        for each in self._masters:
            assert each.low is None or is_placeholder(each.master), (
                "its memory is on the host alone"
            )
        sizes = [each.master.numel() for each in self._masters]
        arrays = lay_out(sizes, [each.names for each in self._masters])
        self.buckets, self.round_buckets = _buckets(arrays, sizes, len(elementwise), rounds)
        self._blocks = {
            name: PinnedBlock(size * _BYTES, device) for name, size in arrays.sizes.items()
        }
        if device.type == "cuda" and not all(block.is_pinned for block in self._blocks.values()):
            warnings.warn(
                f"offload_optimizer: expected that CUDA pins {self.num_bytes / 2**30:.1f} GiB of host memory, and it "
                "does not: the state is copied slowly, and the host waits for it; see the limits of this host",
                stacklevel=2,
            )
        self._arrays = {
            name: self._blocks[name].tensor(0, (size,), torch.float32)
            for name, size in arrays.sizes.items()
        }
        self._held: dict[Tensor, dict[str, Tensor]] = {}
        """Of each parameter: its master weights and moments, in its shape, on the host."""
        for each, offsets in zip(self._masters, arrays.offsets, strict=True):
            self._held[each.master] = {
                name: self._blocks[name].tensor(
                    offset * _BYTES, tuple(each.master.shape), torch.float32
                )
                for name, offset in offsets.items()
            }
        self._offsets = arrays.offsets
        self._staging: Staging | None = None
        self._staged: dict[int, list[StagedPiece]] = {}
        """Pieces of each bucket in its slot, by the bucket's ``id``."""
        self.copy_weights()

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is in host memory."""
        return parameter in self._held

    @property
    def num_bytes(self) -> int:
        """Host memory that the state takes."""
        return sum(block.num_bytes for block in self._blocks.values())

    @property
    def slot_size(self) -> int:
        """Elements of a slot that each bucket fits into."""
        buckets = (*self.buckets, *self.round_buckets)
        return max((bucket.slot_size for bucket in buckets), default=0)

    def master_of(self, parameter: Tensor) -> Tensor:
        """Master weights of a parameter, in its shape: on the host, unless they are the weights."""
        return self._held[parameter].get(MASTER, parameter)

    def moments_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of a parameter by name, in its shape, on the host."""
        return {name: held for name, held in self._held[parameter].items() if name != MASTER}

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copy the 16-bit weights into the master weights; the host waits."""
        for each in self._masters:
            if each.low is None:
                continue
            array = self._held[each.master][MASTER].view(-1)
            for weights, masters in zip(
                each.low.split(BUCKET_ELEMENTS), array.split(BUCKET_ELEMENTS), strict=True
            ):
                masters.copy_(weights.float())

    # ---- through the device -----------------------------------------------------------------------------------------

    def use(self, staging: Staging) -> None:
        """Set the slots through which buckets pass."""
        self._staging = staging
        for buckets in (self.buckets, self.round_buckets):
            for number, bucket in enumerate(buckets):
                slot = staging.slots[number % staging.num_slots]
                self._staged[id(bucket)] = self._pieces(bucket, slot)

    def stage(self, buckets: Sequence[Bucket]) -> Iterator[list[StagedPiece]]:
        """Bring buckets to the device, one after the other; what the caller changes goes back before the next one."""
        staging = self._staging
        assert staging is not None, "slots are set before the first update"

        def load(number: int, slot: int) -> None:
            for host, device in self._spans(buckets[number], staging.slots[slot]):
                device.copy_(host, non_blocking=True)

        def store(number: int, slot: int) -> None:
            for host, device in self._spans(buckets[number], staging.slots[slot]):
                host.copy_(device, non_blocking=True)

        for number, _ in staging.pipeline.run(len(buckets), load, store):
            yield self._staged[id(buckets[number])]

    def wait(self) -> None:
        """Let the host wait until the state is complete on it."""
        if self._staging is not None:
            self._staging.pipeline.wait()

    def let_stream_wait(self) -> None:
        """Let the current stream of a GPU wait until the state is complete on the host."""
        if self._staging is not None and self._device.type == "cuda":
            self._staging.pipeline.let_stream_wait()

    def release(self) -> None:
        """Free the memory once nothing else refers to it; there is no update any more."""
        self.wait()
        self._held.clear()
        self._staged.clear()
        self._arrays.clear()
        for block in self._blocks.values():
            block.release()
        self._blocks.clear()
        self._staging = None

    def _spans(self, bucket: Bucket, slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each range of a bucket in host memory, and its place in a slot."""
        begins = bucket.slots
        for name, span in bucket.spans.items():
            begin = begins[name]
            yield self._arrays[name][span.start : span.stop], slot[begin : begin + span.size]

    def _pieces(self, bucket: Bucket, slot: Tensor) -> list[StagedPiece]:
        begins = bucket.slots
        pieces = []
        for index, start, stop in bucket.pieces:
            master, low, _ = self._masters[index]
            staged: dict[str, Tensor] = {}
            for name, offset in self._offsets[index].items():
                begin = begins[name] + offset + start - bucket.spans[name].start
                staged[name] = slot[begin : begin + stop - start]
            if low is None:
                weights = master.detach().view(-1)[start:stop]
            else:
                weights = staged.pop(MASTER)
                low = low[start:stop]
            pieces.append(StagedPiece(master, start, stop, weights, staged, low))
        return pieces


def _buckets(
    arrays: Arrays,
    sizes: Sequence[int],
    num_elementwise: int,
    rounds: Sequence[Sequence[OffloadedMaster]],
) -> tuple[list[Bucket], list[Bucket]]:
    """Buckets of the parameters that are updated element by element, and one bucket for each round of the others."""
    first_sizes = dict(enumerate(sizes[:num_elementwise]))
    elementwise = [arrays.bucket(pieces) for pieces in cut(first_sizes, BUCKET_ELEMENTS)]
    of_rounds = []
    begin = num_elementwise
    for masters in rounds:
        end = begin + len(masters)
        whole = {index: sizes[index] for index in range(begin, end)}
        pieces = [piece for group in cut(whole, 2**62) for piece in group]
        of_rounds.append(arrays.bucket(pieces))
        begin = end
    return elementwise, of_rounds


# ---- master weights without memory -----------------------------------------------------------------------------------


class MasterPlaceholders(TorchFunctionMode):
    """While Megatron builds its optimizers, master weights of 16-bit weights get no memory.

    megatron-core 0.16.1, optimizer/optimizer.py and distrib_optimizer.py make each by ``.float()``: all together would
    take 4 bytes a parameter of the device, which may not have them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float and args[0].dtype in (torch.bfloat16, torch.float16):
            return placeholder(args[0])
        return func(*args, **(kwargs or {}))


def placeholder(weights: Tensor) -> Tensor:
    """An fp32 tensor of the shape and on the device of ``weights``, whose elements are all the same NaN."""
    nan = torch.full((), math.nan, dtype=torch.float32, device=weights.device)
    return nan.expand(weights.shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor has no memory for its elements."""
    return tensor.untyped_storage().nbytes() < tensor.nbytes
