"""A run in which a rank hangs ends soon on all ranks and says where; a slow run continues."""

import os
import pickle
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.run.hangs import Beat, find_hang, find_straggler
from lightning_megatron.run.heartbeat import Heartbeat
from tests.checkpoint.runs import Run, callback, checkpoints_at, fit, rows_dataset
from tests.launch.test_started_by import has_ended
from tests.marks import exhaustive, on_gpus
from tests.ranks import RankError, run_ranks
from tests.recording import recorded_warnings

LIMITS = {"setup": 4, "step": 3, "checkpoint": 3}


def _callback(
    hook: str,
    act: Callable[[Any], None],
    rank: int,
) -> Any:
    """Callback that acts in one hook, in the second step (or in ``setup``), on one rank."""

    def call(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_rank == rank and (trainer.global_step == 2 or hook == "setup"):
            act(trainer)

    return callback(**{hook: call})


def _train(
    strategy: dict[str, Any],
    act: Callable[[Any], None],
    rank: int,
    folder: Path,
) -> None:
    run = Run(
        strategy=strategy,
        trainer={"max_steps": 4, "default_root_dir": str(folder)},
    )
    fit(run, _callback(BATCH_END, act, rank), checkpoints_at(folder))


def _sleep(trainer: Any) -> None:
    time.sleep(300)


def _stop(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


BATCH_END = "on_train_batch_end"


@pytest.mark.parametrize(
    ("strategy", "act", "rank", "message"),
    [
        pytest.param(
            {"pp": 2}, _sleep, 1, r"is in Hooks\.on_train_batch_end \(.* in _sleep\)", id="sleeps"
        ),
        pytest.param(
            {"tp": 2},
            _stop,
            0,
            "whose store has not answered",
            id="rank 0 is stopped",
        ),
    ],
)
def test_hanging_run_names_the_rank_and_its_location(
    tmp_path: Path,
    strategy: dict[str, Any],
    act: Callable[[Any], None],
    rank: int,
    message: str,
) -> None:
    """More ways to hang: tests/campaigns/faults.py."""
    with pytest.raises(RankError) as caught:
        run_ranks(
            _train,
            2,
            {**strategy, "heartbeat": Heartbeat(**LIMITS)},
            act,
            rank,
            tmp_path,
        )
    lines = _error_lines(caught.value)
    expected = rf"error: rank {rank} hangs.*{message}.*stacks of all ranks: {tmp_path}/stacks"
    assert [line for line in lines if not re.match(expected, line)] == []
    if act is _sleep:
        stacks = [(tmp_path / "stacks" / f"rank_{rank}.txt").read_text() for rank in range(2)]
        assert ["in _sleep" in stack for stack in stacks] == [False, True]


def _loop(trainer: Any) -> None:
    while True:
        time.sleep(0)


def _loop_while_saving(folder: Path) -> None:
    run = Run(
        strategy={"tp": 2, "heartbeat": Heartbeat(**LIMITS)},
        trainer={"max_steps": 4, "default_root_dir": str(folder)},
    )
    fit(run, _callback("on_save_checkpoint", _loop, 1), checkpoints_at(folder))


class _Hanging:
    """Dataset whose seventh sample never comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows = rows_dataset()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        if index == 20 and os.environ["RANK"] == "0":
            (self._folder / "worker").write_text(str(os.getpid()))
            time.sleep(300)
        return self._rows[index]


def _hang_in_a_worker(folder: Path) -> None:
    from torch.utils.data import DataLoader

    def loader(dp: int) -> Any:
        rows: Any = _Hanging(folder)
        return DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork")

    trainer = {"max_steps": 4, "default_root_dir": str(folder)}
    fit(
        Run(
            strategy={"tp": 2, "heartbeat": Heartbeat(**LIMITS)},
            trainer=trainer,
            loader=loader,
        )
    )


def _stop_before_the_first_sample(folder: Path) -> None:
    from lightning_megatron.run.heartbeat import Watch

    start = Watch.start

    def start_and_stop(self: Watch) -> None:
        start(self)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    Watch.start = start_and_stop  # type: ignore[method-assign]
    trainer = {"max_steps": 4, "default_root_dir": str(folder)}
    fit(
        Run(
            strategy={"tp": 2, "heartbeat": Heartbeat(**LIMITS)},
            trainer=trainer,
        )
    )


@pytest.mark.parametrize(
    ("run", "rank", "message"),
    [
        exhaustive(
            _loop_while_saving, 1, r"rank 1 is in Hooks\.on_save_checkpoint \(.* in _loop\)"
        ),
        (_hang_in_a_worker, 0, r"is in a wait for the DataLoader's worker \d \(process \d+\)"),
        exhaustive(
            _stop_before_the_first_sample,
            1,
            r"rank 1 gives no sign of life \(.*\), last (at|in) \S",
        ),
    ],
    ids=["loops while saving", "a worker hangs", "is stopped at once"],
)
def test_hanging_place_is_named(
    tmp_path: Path,
    run: Callable[[Path], None],
    rank: int,
    message: str,
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(run, 2, tmp_path, timeout=60)
    lines = _error_lines(caught.value)
    assert [
        line for line in lines if not re.match(rf"error: rank {rank} hangs.*{message}", line)
    ] == []
    if (worker := tmp_path / "worker").exists():
        assert f"(process {worker.read_text()})" in lines[0]
        assert has_ended(int(worker.read_text()), seconds=10)


def _error_lines(error: RankError) -> list[str]:
    lines = re.findall(r"^error: .*", str(error), re.MULTILINE)
    assert lines, error
    return lines


def _run_own_collective(trainer: Any) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1, device=trainer.strategy.root_device)
    dist.all_reduce(total)
    total.item()  # this host waits here; other hosts continue until they read a value of the next step


def _hang_on_gpus(
    strategy: dict[str, Any],
    act: Callable[[Any], None],
    folder: Path,
) -> None:
    """Steps take longer than the watchdog's interval of a second, so that it has measured them before one hangs."""
    slow = callback(on_train_batch_start=lambda *_: time.sleep(1.5))
    trainer = {
        "accelerator": "gpu",
        "precision": "bf16-mixed",
        "max_steps": 4,
        "default_root_dir": str(folder),
    }
    fit(
        Run(
            strategy={**strategy, "heartbeat": Heartbeat(setup=60, step=5)},
            trainer=trainer,
        ),
        slow,
        _callback(BATCH_END, act, 1),
    )


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("strategy", "act"),
    [({"pp": 2}, _sleep), ({}, _run_own_collective)],
    ids=["sleeps", "collective"],
)
def test_hanging_rank_is_named_while_nccl_waits(
    tmp_path: Path,
    strategy: dict[str, Any],
    act: Callable[[Any], None],
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_hang_on_gpus, 2, strategy, act, tmp_path)
    lines = _error_lines(caught.value)
    expected = r"error: rank 1 hangs: expected progress within 5 s, got none for (\d+) s: rank 1 is in .*Hooks\.on"
    matches = [re.match(expected, line) for line in lines]
    assert all(match is not None and int(match[1]) <= 15 for match in matches), lines
    assert f"in {act.__name__}" in (tmp_path / "stacks" / "rank_1.txt").read_text()
    for rank in range(2):
        assert pickle.loads((tmp_path / "stacks" / f"nccl_{rank}").read_bytes())[
            "entries"
        ]  # NCCL's flight recorder


def _send_sigterm(trainer: Any) -> None:
    threading.Timer(
        0.5,
        os.kill,
        (os.getpid(), signal.SIGTERM),
    ).start()


def _hang_and_terminate(accelerator: str, folder: Path) -> None:
    limits = Heartbeat(setup=100, step=100, grace=2)
    trainer = {"accelerator": accelerator, "max_steps": 4, "default_root_dir": str(folder)}
    callbacks = [_callback(BATCH_END, _send_sigterm, 0), _callback(BATCH_END, _sleep, 1)]
    fit(
        Run(strategy={"heartbeat": limits}, trainer=trainer),
        *callbacks,
        checkpoints_at(folder),
    )


@pytest.mark.parametrize(
    "accelerator",
    ["cpu", on_gpus(2, "gpu")],
)
def test_sigterm_ends_a_hanging_run_within_the_grace_period(
    tmp_path: Path, accelerator: str
) -> None:
    message = r"error: rank 1 hangs.*; SIGTERM came \d+ s ago, and the run ends without saving"
    with pytest.raises(RankError, match=message):
        run_ranks(_hang_and_terminate, 2, accelerator, tmp_path)


def _compute(trainer: Any) -> None:
    end = time.monotonic() + LIMITS["setup"] + 2
    while time.monotonic() < end:
        pass


def _work(trainer: Any, left: int = LIMITS["step"] + 3) -> None:
    """Change the stack every second, which counts as progress."""
    time.sleep(1)
    if left:
        _work(trainer, left - 1)


def _stop_and_continue(trainer: Any) -> None:
    from lightning_megatron.run import heartbeat

    heartbeat._SUSPENDED = 1.5
    subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2)


def _take_long(folder: Path) -> tuple[int, list[str]]:
    """Compute in set-up, work in a hook, stop and continue a rank; return the last step and warnings of stalls."""
    callbacks = [
        _callback("setup", _compute, 0),
        _callback(BATCH_END, _work, 1),
        _callback("on_train_batch_start", _stop_and_continue, 1),
    ]
    heartbeat = Heartbeat(setup=LIMITS["setup"], step=LIMITS["step"] + 3)
    run = Run(
        strategy={"heartbeat": heartbeat},
        trainer={"max_steps": 4, "default_root_dir": str(folder)},
    )
    with recorded_warnings("was suspended") as warned:
        trainer, _ = fit(run, *callbacks)
    return trainer.global_step, warned


def test_slow_run_continues_and_a_stopped_rank_is_named(tmp_path: Path) -> None:
    (steps, of_rank_0), (_, (warning,)) = run_ranks(_take_long, 2, tmp_path)
    assert (steps, of_rank_0) == (4, [])
    assert re.fullmatch(r"rank 1 was suspended, or held the GIL, for \d+ s", warning)


def _beat(stale: float, location: str = "in all_reduce (a.py:1 in f)", **fields: Any) -> Beat:
    return Beat(
        stale=stale, limit=60, location=location, is_waiting="all_reduce" in location, **fields
    )


def test_run_hangs_only_if_no_rank_makes_progress() -> None:
    def report(*beats: Beat, cap: float = 1e9) -> str:
        hang = find_hang(beats, [], beats[0], cap)
        return "" if hang is None else hang.text

    waits = _beat(70)
    hangs = _beat(70, "in C.setup (b.py:2 in setup)")
    works = _beat(10, "at (c.py:3 in g)")
    assert report(waits, works) == ""
    assert report(waits, works, cap=5) != ""
    message = "rank 2 hangs: expected progress within 60 s, got none for 70 s: rank 2 is in C.setup"
    assert report(waits, waits, hangs).startswith(message)
    assert report(waits, waits, _beat(70, "in all_reduce, in C.x (d.py:4 in x)")).startswith(
        "rank 2 hangs"
    )
    desynchronized = report(waits, _beat(70, "in all_reduce, in D.y (d.py:5 in y)"))
    assert desynchronized.startswith("ranks 0, 1 hang")
    assert desynchronized.endswith(
        "in all_reduce (a.py:1 in f), and the others in all_reduce, in D.y (d.py:5 in y)"
    )
    behind, ahead = (
        _beat(70, f"in all_reduce, in E.z (e.py:{n} in z)", in_user_code=True, steps=n)
        for n in (6, 7)
    )
    assert report(ahead, behind).startswith("rank 1 hangs")


def test_straggler_is_named_only_after_many_steps() -> None:
    def beats(sampled_steps: int, *wait_fractions: float) -> list[Beat]:
        fields: dict[str, Any] = {
            "sampled_steps": sampled_steps,
            "busy": "in C.on_train_batch_start (e.py:5 in h)",
        }
        return [_beat(0, wait_fraction=fraction, **fields) for fraction in wait_fractions]

    assert find_straggler(beats(60, 0.83, 0.9, 0.05)) == (2, (
        "rank 2 is slower than the others: over the last 60 steps they waited for other ranks 86% of the time, and it "
        "5%; mostly it is in C.on_train_batch_start (e.py:5 in h)"
    ))  # fmt: skip
    assert find_straggler(beats(10, 0.9, 0.9, 0.0)) is None
    assert find_straggler(beats(60, 0.5, 0.5, 0.3)) is None


def test_limits_below_one_second_are_refused() -> None:
    from lightning_megatron import MegatronStrategy

    with pytest.raises(
        ConfigError, match=r"Heartbeat\.step=0 must be at least 1; correct Heartbeat\.step"
    ):
        Heartbeat(step=0)
    with pytest.raises(ConfigError, match=r"timeout=0\.5 must be at least 1; correct timeout"):
        MegatronStrategy(timeout=0.5)


@pytest.mark.parametrize("name", ["setup", "step", "checkpoint"])
def test_limits_beyond_the_timeout_are_refused(name: str) -> None:
    from lightning_megatron import MegatronStrategy

    limit = Heartbeat(**{name: 3600})
    MegatronStrategy(timeout=3600, heartbeat=limit)
    MegatronStrategy(timeout=45)
    expected = rf"Heartbeat\.{name}=3600: expected at most timeout=1800 seconds, .* raise Meg"
    with pytest.raises(ConfigError, match=expected):
        MegatronStrategy(heartbeat=limit)


def _watching_threads(strategy: dict[str, Any]) -> set[str]:
    """Functions of this package that run in threads of a rank in a training step."""
    running: set[str] = set()

    def look(*_: Any) -> None:
        running.update(thread.name for thread in threading.enumerate() if "_loop" in thread.name)

    fit(
        Run(
            strategy={"tp": 2, **strategy},
            trainer={"max_steps": 1},
        ),
        callback(**{BATCH_END: look}),
    )
    return {name.partition("(")[2].rstrip(")") for name in running}


def test_a_run_without_heartbeat_is_not_watched() -> None:
    watching = {"_sample_loop", "_report_loop"}
    assert run_ranks(_watching_threads, 2, {}) == [watching, watching]
    assert run_ranks(_watching_threads, 2, {"heartbeat": None}) == [set(), set()]


@pytest.mark.parametrize("value", [60, "soon", True])
def test_a_heartbeat_is_an_object_of_limits_or_none(value: Any) -> None:
    from lightning_megatron import MegatronStrategy

    expected = (
        rf"heartbeat={value!r}: expected Heartbeat\(\.\.\.\) or a dict, with .*, or None, got"
    )
    with pytest.raises(ConfigError, match=expected):
        MegatronStrategy(heartbeat=value)
