"""A run one rank of which hangs ends soon, on all ranks, and says where; one that only takes long goes on."""

import os
import pickle
import re
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.engine.heartbeat import Beat, Heartbeat, find_hang, find_straggler
from lightning_megatron.errors import ConfigError
from tests.checkpoint.runs import Run, callback, checkpoints_at, fit
from tests.ranks import RankError, run_ranks

LIMITS = {"setup": 4, "step": 3, "checkpoint": 3}


def _callback(hook: str, act: Callable[[Any], None], rank: int) -> Any:
    """Does something in one hook, in the second step, on one rank."""

    def call(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == rank and (trainer.global_step == 2 or hook == "setup"):
            act(trainer)

    return callback(**{hook: call})


def _train(strategy: dict[str, Any], act: Callable[[Any], None], rank: int, folder: Path) -> None:
    run = Run(strategy=strategy, trainer={"max_steps": 4, "default_root_dir": str(folder)})
    fit(run, _callback(BATCH_END, act, rank), checkpoints_at(folder))


def _sleeps(trainer: Any) -> None:
    time.sleep(300)


def _is_stopped(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


BATCH_END = "on_train_batch_end"


@pytest.mark.parametrize(
    ("strategy", "act", "rank", "told"),
    [
        pytest.param({"pp": 2}, _sleeps, 1, r"is in Hooks\.on_train_batch_end \(.* in _sleeps\)", id="sleeps"),
        pytest.param({"tp": 2}, _is_stopped, 0, "whose store has not answered", id="rank 0 is stopped"),
    ],
)
def test_a_run_that_hangs_names_the_rank_and_its_place(
    tmp_path: Path, strategy: dict[str, Any], act: Callable[[Any], None], rank: int, told: str
) -> None:
    """More ways to hang: tests/campaigns/faults.py."""
    with pytest.raises(RankError) as caught:
        run_ranks(_train, 2, {**strategy, "heartbeat": Heartbeat(**LIMITS)}, act, rank, tmp_path)
    lines = re.findall(r"^error: .*", str(caught.value), re.MULTILINE)
    assert lines, caught.value
    expected = rf"error: rank {rank} hangs.*{told}.*stacks of all ranks: {tmp_path}/stacks"
    assert [line for line in lines if not re.match(expected, line)] == []
    if act is _sleeps:
        stacks = [(tmp_path / "stacks" / f"rank_{each}.txt").read_text() for each in range(2)]
        assert "in _sleeps" in stacks[1]
        assert "in _sleeps" not in stacks[0]


def _has_an_nccl_collective_of_its_own(trainer: Any) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1, device=trainer.strategy.root_device)
    dist.all_reduce(total)
    total.item()  # here the host waits; those of the others go on to where they read a number of the next step


def _hang_on_gpus(strategy: dict[str, Any], act: Callable[[Any], None], folder: Path) -> None:
    """Steps are longer than the watch's second, so that it knows how long they take when one hangs."""
    slow = callback(on_train_batch_start=lambda *_: time.sleep(1.5))
    trainer = {"accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 4, "default_root_dir": str(folder)}
    fit(
        Run(strategy={**strategy, "heartbeat": Heartbeat(setup=60, step=5)}, trainer=trainer),
        *(slow, _callback(BATCH_END, act, 1)),
    )


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("strategy", "act"), [({"pp": 2}, _sleeps), ({}, _has_an_nccl_collective_of_its_own)], ids=["sleeps", "collective"]
)
def test_a_rank_that_hangs_is_named_while_nccl_waits(
    tmp_path: Path, strategy: dict[str, Any], act: Callable[[Any], None]
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_hang_on_gpus, 2, strategy, act, tmp_path)
    lines = re.findall(r"^error: .*", str(caught.value), re.MULTILINE)
    assert lines, caught.value
    expected = (
        r"error: rank 1 hangs: expected progress within 5 s, got none for (\d+) s: rank 1 is in .*Hooks\.on_train"
    )
    found = [re.match(expected, line) for line in lines]
    assert all(each is not None and int(each[1]) <= 15 for each in found), lines
    assert f"in {act.__name__}" in (tmp_path / "stacks" / "rank_1.txt").read_text()
    for rank in range(2):
        assert pickle.loads((tmp_path / "stacks" / f"nccl_{rank}").read_bytes())["entries"]  # NCCL's last collectives


def _gets_sigterm(trainer: Any) -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _hang_and_terminate(accelerator: str, folder: Path) -> None:
    limits = Heartbeat(setup=100, step=100, grace=2)
    trainer = {"accelerator": accelerator, "max_steps": 4, "default_root_dir": str(folder)}
    callbacks = [_callback(BATCH_END, _gets_sigterm, 0), _callback(BATCH_END, _sleeps, 1)]
    fit(Run(strategy={"heartbeat": limits}, trainer=trainer), *callbacks, checkpoints_at(folder))


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(2))])
def test_sigterm_ends_a_run_that_hangs_within_the_grace(tmp_path: Path, accelerator: str) -> None:
    with pytest.raises(
        RankError, match=r"error: rank 1 hangs.*; SIGTERM came \d+ s ago, and the run ends without saving"
    ):
        run_ranks(_hang_and_terminate, 2, accelerator, tmp_path)


def _computes(trainer: Any) -> None:
    end = time.monotonic() + LIMITS["setup"] + 2
    while time.monotonic() < end:
        pass


def _works(trainer: Any, left: int = LIMITS["step"] + 3) -> None:
    """Is elsewhere every second."""
    time.sleep(1)
    if left:
        _works(trainer, left - 1)


def _was_stopped(trainer: Any) -> None:
    from lightning_megatron.engine import heartbeat

    heartbeat._SUSPENDED = 1.5
    subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2)


def _take_long(folder: Path) -> tuple[int, list[str]]:
    """Set-up that computes on one rank, a hook that works, a rank that is stopped and goes on; what was warned of."""
    callbacks = [
        _callback("setup", _computes, 0),
        _callback(BATCH_END, _works, 1),
        _callback("on_train_batch_start", _was_stopped, 1),
    ]
    run = Run(
        strategy={"heartbeat": Heartbeat(setup=LIMITS["setup"], step=LIMITS["step"] + 3)},
        trainer={"max_steps": 4, "default_root_dir": str(folder)},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fit(run, *callbacks)
    return int(trainer.global_step), [str(each.message) for each in caught if "stood still" in str(each.message)]


def test_a_run_that_only_takes_long_goes_on_and_a_rank_that_stood_still_is_named(tmp_path: Path) -> None:
    (steps, others), (_, warned) = run_ranks(_take_long, 2, tmp_path)
    assert (steps, others) == (4, [])
    assert [re.sub(r"for \d+ s", "for N s", each) for each in warned] == [
        "rank 1 stood still for N s: it was stopped, or held Python's lock"
    ]


def _beat(stale: float, location: str = "in all_reduce (a.py:1 in f)", **fields: Any) -> Beat:
    return Beat(stale=stale, limit=60, location=location, is_waiting="all_reduce" in location, **fields)


def test_a_run_hangs_only_if_no_rank_makes_progress() -> None:
    def told(*beats: Beat, cap: float = 1e9) -> str:
        found = find_hang(beats, [], beats[0], cap)
        return "" if found is None else found.text

    waits, hangs, works = _beat(70), _beat(70, "in C.setup (b.py:2 in setup)"), _beat(10, "at (c.py:3 in g)")
    assert told(waits, works) == ""
    assert told(waits, works, cap=5) != ""
    says = "rank 2 hangs: expected progress within 60 s, got none for 70 s: rank 2 is in C.setup"
    assert told(waits, waits, hangs).startswith(says)
    assert told(waits, waits, _beat(70, "in all_reduce, in C.x (d.py:4 in x)")).startswith("rank 2 hangs")
    shifted = told(waits, _beat(70, "in all_reduce, in D.y (d.py:5 in y)"))
    assert shifted.startswith("ranks 0, 1 hang")
    assert shifted.endswith("in all_reduce (a.py:1 in f), and the others in all_reduce, in D.y (d.py:5 in y)")
    behind, ahead = (_beat(70, f"in all_reduce, in E.z (e.py:{n} in z)", in_user_code=True, steps=n) for n in (6, 7))
    assert told(ahead, behind).startswith("rank 1 hangs")


def test_a_slow_rank_is_named_only_after_many_steps() -> None:
    def seen(sampled_steps: int, *waited: float) -> list[Beat]:
        return [
            _beat(0, sampled_steps=sampled_steps, wait_fraction=each, busy="in C.on_train_batch_start (e.py:5 in h)")
            for each in waited
        ]

    assert find_straggler(seen(60, 0.83, 0.9, 0.05)) == (2, (
        "rank 2 is slower than the others: over the last 60 steps they waited for other ranks 86% of the time, and it "
        "5%; mostly it is in C.on_train_batch_start (e.py:5 in h)"
    ))  # fmt: skip
    assert find_straggler(seen(10, 0.9, 0.9, 0.0)) is None
    assert find_straggler(seen(60, 0.5, 0.5, 0.3)) is None


def test_wrong_limits_are_refused() -> None:
    from lightning_megatron import MegatronStrategy

    with pytest.raises(ConfigError, match=r"Heartbeat\.step=0 must be at least 1; correct Heartbeat\.step"):
        Heartbeat(step=0)
    with pytest.raises(ConfigError, match=r"timeout=0\.5 must be at least 1; correct timeout"):
        MegatronStrategy(timeout=0.5)
