"""Copies into peers' memory (rows of linears, attention heads) give the same results as collectives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.marks import exhaustive
from tests.parity.comparison import assert_same_run
from tests.parity.training import (
    TP2_SP,
    Case,
    Layout,
    Outcome,
    join_outcomes,
    loader_of,
    module_of,
    outcome,
    train_module,
)
from tests.ranks import run_ranks


class _FakeWindow:
    """Stand-in for a memory window on the CPU: data written for a peer is sent at the barrier."""

    def __init__(
        self,
        group: Any,
        num_bytes: int,
        device: torch.device,
    ) -> None:
        self.group = group
        self.num_bytes = num_bytes
        self.rank = group.rank()
        self.num_barriers = 0

    def swap(self) -> None:
        self.sent: dict[int, Tensor] = {}
        self.got: dict[int, Tensor] = {}

    def buffer(self, source: int, target: int, like: Tensor) -> Tensor:
        assert like.numel() * like.element_size() <= self.num_bytes
        empty = torch.empty_like(like).view(torch.uint8)
        where = self.got[source] if target == self.rank else self.sent.setdefault(target, empty)
        return where.view(like.dtype)

    def barrier(self) -> None:
        self.num_barriers += 1
        self.got = {rank: torch.empty_like(sent) for rank, sent in self.sent.items()}
        operations = []
        for rank, sent in self.sent.items():
            operations.append(
                dist.P2POp(
                    dist.isend,
                    sent,
                    group=self.group,
                    group_peer=rank,
                )
            )
            operations.append(
                dist.P2POp(
                    dist.irecv,
                    self.got[rank],
                    group=self.group,
                    group_peer=rank,
                )
            )
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _train_with_fake_windows(case: Case) -> tuple[Outcome, Tensor | None, int]:
    from lightning_megatron.engine.ops import peer_copies

    windows: list[_FakeWindow] = []

    def make_window(*args: Any) -> _FakeWindow:
        windows.append(_FakeWindow(*args))
        return windows[-1]

    peer_copies.Window, peer_copies.create_peer_copies = make_window, peer_copies.PeerCopies  # type: ignore[assignment, misc]
    return *_train(case), sum(window.num_barriers for window in windows)


def _train(case: Case) -> tuple[Outcome, Tensor | None]:
    """Train; return the outcome and the trained module's logits, for which rows are not sharded."""
    module = module_of(case)
    run = train_module(module, case, loader_of(case))
    return run, None if case.model == "t5" else module.logits(torch.arange(16).view(2, 8)).cpu()


_FORCED = (("tp_comm_overlap", True),)


@pytest.mark.parametrize(
    ("model", "layout", "exchanges"),
    [
        # Four linears in each of four layers, and the output layer, forwards and backwards.
        (
            "llama",
            Layout(tp=2, dp=2, num_microbatches=3, overlap_communication=True),
            2 * (4 * 4 + 1),
        ),
        (
            "gpt2",
            Layout(tp=4, num_microbatches=3),
            2 * (4 * 4 + 1),
        ),
        (
            "t5",
            Layout(tp=2, recompute="selective", num_microbatches=3),
            None,
        ),
        # Heads, exchanged before and after attention in each of four layers.
        (
            "llama",
            Layout(cp=2, cp_comm_type="a2a", num_microbatches=3, overlap_communication=True),
            2 * 4 * 2,
        ),
        exhaustive(
            "t5",
            Layout(cp=2, cp_comm_type="a2a", tp=2, num_microbatches=3),
            None,
        ),
    ],
    ids=str,
)
def test_peer_copies_equal_collectives(model: str, layout: Layout, exchanges: int | None) -> None:
    if layout.tp > 1:
        layout = replace(layout, sequence_parallel=True, transformer_config_overrides=_FORCED)
    case = Case(
        model=model,
        layout=layout,
        steps=3,
        labels="uneven",
        clip=0.5,
    )
    ranks = run_ranks(_train_with_fake_windows, layout.world_size, case)
    barriers = [count for *_, count in ranks]
    assert min(barriers) == max(barriers) > 0
    assert exchanges is None or barriers[0] == 3 * 3 * exchanges
    assert_same_run(join_outcomes([run for run, *_ in ranks]), outcome(case.on_one_process))
    if ranks[0][1] is not None:
        [(_, logits)] = run_ranks(_train, 1, case.on_one_process)
        # fp32 rounding after training.
        torch.testing.assert_close(
            ranks[0][1],
            logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_fp8_peer_copies_equal_collectives() -> None:
    layout = Layout(tp=2, sequence_parallel=True, num_microbatches=3, fp8="tensorwise")
    case = Case(
        steps=3,
        precision="bf16-mixed",
        layout=replace(layout, transformer_config_overrides=_FORCED),
    )
    ranks = run_ranks(_train_with_fake_windows, 2, case)
    assert {count for *_, count in ranks} == {3 * 3 * 2 * (4 * 4 + 1)}
    assert_same_run(
        join_outcomes([run for run, *_ in ranks]),
        outcome(replace(case, layout=layout)),
    )


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "layout",
    [
        TP2_SP,
        Layout(tp=2, sequence_parallel=True, fp8="tensorwise"),
        Layout(cp=2, cp_comm_type="a2a"),
    ],
    ids=str,
)
def test_peer_copies_equal_collectives_on_gpus(layout: Layout) -> None:
    precision = "32-true" if layout.fp8 is None else "bf16-mixed"
    fields = (("intermediate_size", 64),)  # half of it is a multiple of 16
    case = Case(
        model="llama",
        model_fields=fields,
        layout=replace(layout, num_microbatches=3),
        precision=precision,
        accelerator="gpu",
    )
    plain = run_ranks(_train_without_copies, layout.world_size, case)
    assert_same_run(outcome(case), join_outcomes([run for run, _ in plain]))


def _train_without_copies(case: Case) -> tuple[Outcome, Tensor | None]:
    from lightning_megatron.engine.ops import peer_copies

    peer_copies.create_peer_copies = lambda group: None
    return _train(case)
