"""State in host memory: which elements pass the device together, in which order, and what an update makes of them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron.engine.bucket_plan import ALIGNMENT, cut, lay_out, share_of
from lightning_megatron.engine.host_state import (
    HostState,
    OffloadedMaster,
    Pipeline,
    Staging,
    is_placeholder,
    placeholder,
)
from lightning_megatron.engine.ops.adam import FusedAdam, FusedSGD, MasterOptimizer, copy
from lightning_megatron.engine.runtime import emulated_cuda
from tests.marks import on_gpus

NAMES = ("param", "exp_avg", "exp_avg_sq")

# ---- arithmetic -----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.integers(1, 1000), max_size=12), st.integers(1, 5))
def test_pieces_are_all_elements_in_order_and_fill_buckets(sizes: list[int], limit: int) -> None:
    limit *= ALIGNMENT
    groups = list(cut(dict(enumerate(sizes)), limit))
    elements = [
        (piece.parameter, number)
        for group in groups
        for piece in group
        for number in range(*piece[1:])
    ]
    assert elements == [
        (index, number) for index, size in enumerate(sizes) for number in range(size)
    ]
    for group in groups:
        assert all(piece.start % ALIGNMENT == 0 for piece in group)
        taken = [-(-(piece.stop - piece.start) // ALIGNMENT) * ALIGNMENT for piece in group]
        assert sum(taken) <= limit
        assert sum(taken) == limit or group is groups[-1]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 700), st.sampled_from([NAMES, NAMES[1:], NAMES[:2]]))),
    st.integers(1, 4),
)
def test_buckets_are_disjoint_ranges_that_cover_every_array(
    parameters: list[tuple[int, tuple[str, ...]]], limit: int
) -> None:
    sizes = [size for size, _ in parameters]
    arrays = lay_out(sizes, [names for _, names in parameters])
    buckets = [arrays.bucket(group) for group in cut(dict(enumerate(sizes)), limit * ALIGNMENT)]
    for name in NAMES:
        spans = [bucket.spans[name] for bucket in buckets if name in bucket.spans]
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.stop <= after.start
        held = sum(size for size, names in parameters if name in names)
        assert held <= sum(span.size for span in spans) <= arrays.sizes.get(name, 0)
    for bucket in buckets:
        begins = bucket.slots
        ends = [begins[name] + span.size for name, span in bucket.spans.items()]
        assert max(ends, default=0) <= bucket.slot_size <= 3 * limit * ALIGNMENT
        assert all(begin % ALIGNMENT == 0 for begin in begins.values())


@pytest.mark.parametrize(
    ("share", "count"),
    [(0.0, 0), (0.1, 1), (0.25, 1), (0.3, 2), (0.75, 3), (1.0, 4)],
)
def test_share_is_reached_by_as_few_parameters_as_possible(share: float, count: int) -> None:
    assert share_of([5, 5, 5, 5], share) == count


# ---- the order of copies --------------------------------------------------------------------------------------------

IN, WORK, OUT = 4.0, 0.5, 4.0
"""Seconds of a bucket's way in, of its update and of its way back."""


class _Stream:
    """A stream in simulated time: what is queued begins when what it waits for and what is before it have ended."""

    current: "_Stream"

    def __init__(self) -> None:
        self.now = 0.0

    def record_event(self) -> float:
        return self.now

    def wait_event(self, event: float) -> None:
        self.now = max(self.now, event)

    def wait_stream(self, other: "_Stream") -> None:
        self.wait_event(other.now)

    def run(self, seconds: float) -> tuple[float, float]:
        begin = self.now
        self.now += seconds
        return begin, self.now


@contextlib.contextmanager
def _simulated() -> Iterator[None]:
    _Stream.current = _Stream()

    @contextlib.contextmanager
    def within(stream: _Stream) -> Iterator[None]:
        outside, _Stream.current = _Stream.current, stream
        yield
        _Stream.current = outside

    with (
        mock.patch("torch.cuda.Stream", _Stream),
        mock.patch("torch.cuda.current_stream", side_effect=lambda: _Stream.current),
        mock.patch("torch.cuda.stream", within),
    ):
        yield


@pytest.mark.parametrize("num_slots", [2, 4])
@pytest.mark.parametrize("num_buckets", [1, 3, 40])
def test_copies_overlap_in_both_directions_and_never_meet(num_slots: int, num_buckets: int) -> None:
    uses_of_slots: dict[int, list[tuple[float, float]]] = {}
    uses_of_buckets: dict[int, list[tuple[float, float]]] = {}

    def use(bucket: int, slot: int, seconds: float) -> None:
        interval = _Stream.current.run(seconds)
        uses_of_slots.setdefault(slot, []).append(interval)
        uses_of_buckets.setdefault(bucket, []).append(interval)

    def load(bucket: int, slot: int) -> None:
        use(bucket, slot, IN)

    def store(bucket: int, slot: int) -> None:
        use(bucket, slot, OUT)

    with _simulated():
        pipeline = Pipeline(num_slots)
        work = _Stream.current
        for _ in range(2):
            begin = work.now
            for bucket, slot in pipeline.run(num_buckets, load, store):
                use(bucket, slot, WORK)
            exposed = work.now - begin
    for uses in (*uses_of_slots.values(), *uses_of_buckets.values()):
        for (_, ended), (begun, _) in zip(uses, uses[1:], strict=False):
            assert ended <= begun
    # The work waits for one direction, and once for the other: the end of the update before.
    slack = IN + WORK + OUT
    if num_slots == 2:
        slack += num_buckets * WORK
    assert exposed <= num_buckets * IN + slack


# ---- updates --------------------------------------------------------------------------------------------------------

SHAPES = ((3, 50), (5,), (700,), (64, 9), (2, 2), (1000,))


def _engine(device: str) -> contextlib.AbstractContextManager[None]:
    return emulated_cuda() if device == "cpu" else contextlib.nullcontext()


def _made(kind: type[MasterOptimizer], groups: list[dict[str, Any]]) -> Any:
    made: Any = kind
    if kind is FusedSGD:
        return made(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
    return made(groups, lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("device", "scale"), [("cpu", 1), on_gpus(1, "cuda", 200)])
def test_updates_equal_those_of_state_on_the_device(
    kind: type[MasterOptimizer], low: torch.dtype, device: str, scale: int
) -> None:
    """Bit for bit, also after a step that changes nothing, and with a gradient that is missing."""
    generator = torch.Generator().manual_seed(3)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    shapes = [tuple(size * scale for size in shape) for shape in SHAPES]
    weights = [random(shape).to(low) for shape in shapes]
    masters = [weight.float().clone() for weight in weights]
    weights_of_host = [weight.clone() for weight in weights]
    held = weights_of_host
    if low is not torch.float32:
        held = [placeholder(weight) for weight in weights_of_host]
    with (
        mock.patch("lightning_megatron.engine.host_state.BUCKET_ELEMENTS", 4 * ALIGNMENT * scale),
        _engine(device),
        torch.no_grad(),
    ):
        plain = _made(kind, [{"params": masters[:3]}, {"params": masters[3:], "lr": 0.2}])
        offloaded = _made(kind, [{"params": held[:3]}, {"params": held[3:], "lr": 0.2}])
        host = HostState(
            [
                OffloadedMaster(
                    master,
                    None if low is torch.float32 else weight.view(-1),
                    offloaded.state_names,
                )
                for master, weight in zip(held, weights_of_host, strict=True)
            ],
            [],
            torch.device(device),
        )
        offloaded.keep_on_host(host)
        host.use(Staging(host.slot_size, torch.device(device)))
        assert len(host.buckets) > 4
        for step in range(6):
            scales = torch.full((), 1.7, device=device)
            found_inf = torch.full((1,), float(step == 2), device=device)
            for mine, other, shape in zip(masters, held, shapes, strict=True):
                gradient = random(shape)
                mine.grad = gradient.clone()
                other.grad = gradient
            masters[4].grad = held[4].grad = None
            for optimizer in (plain, offloaded):
                optimizer.grad_scale = scales
                optimizer.found_inf = found_inf
                optimizer.step()
            if low is not torch.float32:
                copy(
                    [masters[i] for i in range(6) if i != 4],
                    [weights[i] for i in range(6) if i != 4],
                )
        host.wait()
        for mine, other, weight, weight_of_host in zip(
            masters, held, weights, weights_of_host, strict=True
        ):
            assert torch.equal(offloaded.master_of(other).to(device), mine)
            for name in offloaded.state_names if mine.grad is not None else ():
                moment = offloaded.state[other][name]
                assert moment.device.type == "cpu"
                assert moment.is_pinned() == (device == "cuda")
                assert torch.equal(moment.to(device), plain.state[mine][name])
            if low is not torch.float32:
                assert torch.equal(weight, weight_of_host)


def test_placeholders_hold_no_elements_and_are_left_out_of_copies() -> None:
    weights = torch.ones(2, 3, dtype=torch.bfloat16)
    master = placeholder(weights)
    assert is_placeholder(master)
    assert master.isnan().all()
    assert not is_placeholder(weights)
    copy([master, torch.zeros(2)], [weights, target := torch.ones(2)])
    assert weights.eq(1).all()
    assert target.eq(0).all()
