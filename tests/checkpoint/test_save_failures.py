"""A save that fails costs a warning: the run goes on, nothing is removed, and the next save makes it good."""

import os
import re
import resource
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Run, callback, checkpoints_at, engine_run, fit, save, train_with_checkpoints
from tests.ranks import RankError, run_ranks

RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 4})


def _full_disk(victim: int, first: int, last: int, seen: dict[int, list[str]], folder: Path) -> Any:
    """A limit on the size of files stands in for a disk without room, for the saves of some steps."""

    def limit(trainer: Any, *_: Any) -> None:
        # Else it would depend on the clock which save meets the limit.
        trainer.strategy.checkpointing.finish()
        trainer.strategy.barrier()
        seen[trainer.global_step] = _names(folder)
        trainer.strategy.barrier()
        if trainer.global_rank == victim:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            size = 10_000 if first <= trainer.global_step + 1 <= last else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return callback(on_train_batch_start=limit)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".ckpt" and path.exists())


def _train_on_a_full_disk(run: Run, folder: Path, victim: int, steps: tuple[int, int]) -> Any:
    """Which checkpoints there were before each step, and at the end; the warnings."""
    seen: dict[int, list[str]] = {}
    disk = _full_disk(victim, *steps, seen, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _, trace = fit(run, disk, checkpoints_at(folder, save_top_k=1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    texts = [str(each.message) for each in caught if "is not written" in str(each.message)]
    return list(trace.steps), seen, texts


@pytest.mark.parametrize(
    ("victim", "async_save"),
    [pytest.param(0, False, marks=pytest.mark.exhaustive), (1, True)],
    ids=["rank 0", "rank 1, beside training"],
)
def test_a_full_disk_costs_a_warning_and_keeps_the_older_checkpoint(
    tmp_path: Path, victim: int, async_save: bool
) -> None:
    run = RUN.but(strategy={"async_save": async_save})

    results = run_ranks(_train_on_a_full_disk, 2, run, tmp_path, victim, (2, 3))

    for steps, seen, _ in results:
        assert steps == [1, 2, 3, 4]
        assert seen == {0: [], 1: ["step=1.ckpt"], 2: ["step=1.ckpt"], 3: ["step=1.ckpt"]}
    texts = results[0][2]
    assert [text.split()[1] for text in texts] == [str(tmp_path / f"step={step}.ckpt") for step in (2, 3)]
    assert all("the next save is tried as usual" in text for text in texts)
    assert results[1][2] == []
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]


def _train_with_state_that_is_no_data(run: Run, folder: Path) -> None:
    fit(run, callback(state_dict=lambda: {"path": object()}), checkpoints_at(folder))


def _train_below_a_file(run: Run, folder: Path) -> None:
    (folder / "file").touch()
    train_with_checkpoints(run, folder / "file" / "below")


@pytest.mark.parametrize(
    ("train", "given", "message", "left"),
    [
        (_train_on_a_full_disk, (1, (4, 4)), "step=4.ckpt is not written", ["step=3.ckpt"]),
        (_train_with_state_that_is_no_data, (), "its state must be plain data", []),
        (_train_below_a_file, (), r"cannot be saved in \S+file/below: \S+file is not a directory; give", ["file"]),
    ],
    ids=["a last save fails", "a user's mistake", "a folder that cannot be made, before the first step"],
)
def test_what_ends_a_run(tmp_path: Path, train: Any, given: tuple[Any, ...], message: str, left: list[str]) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(train, 2, RUN.but(strategy={"async_save": True}), tmp_path, *given)
    assert caught.value.error_type == "CheckpointError"
    assert [path.name for path in tmp_path.iterdir()] == left


def _fails(error: Exception, rank: int | None = None) -> Any:
    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and rank in (None, trainer.global_rank):
            raise error

    return callback(on_train_batch_start=fail)


def _fail_on_one_rank(run: Run, folder: Path) -> None:
    """A save is under way when rank 1 alone meets what the library takes for a user's mistake."""
    from datetime import timedelta

    import lightning.pytorch as pl

    from lightning_megatron import DataError, checkpointing
    from lightning_megatron.checkpoint.save import Save

    Save.is_written = lambda self: False  # type: ignore[method-assign]
    checkpointing._FAILURE_WAIT = timedelta(seconds=1)

    fit(
        run,
        _fails(DataError("a bad sample"), rank=1),
        pl.callbacks.OnExceptionCheckpoint(folder, "rescue"),
        checkpoints_at(folder, save_top_k=1),
    )


def test_a_rank_that_fails_alone_does_not_wait_for_the_others(tmp_path: Path) -> None:
    run = RUN.but(strategy={"tp": 1, "async_save": True}, trainer={"enable_checkpointing": True})
    with pytest.raises(RankError, match="a bad sample") as caught:
        run_ranks(_fail_on_one_rank, 2, run, tmp_path, timeout=60)
    assert (caught.value.rank, caught.value.error_type) == (1, "DataError")
    assert "rescue.ckpt is not written: not all ranks have failed" in str(caught.value)
    assert _names(tmp_path) == ["step=2.ckpt"]


def _fail_on_all_ranks(run: Run, folder: Path) -> None:
    import lightning.pytorch as pl

    fit(run, _fails(RuntimeError("everywhere")), pl.callbacks.OnExceptionCheckpoint(folder, "rescue"))


def test_ranks_that_fail_together_save_where_a_callback_says_so(tmp_path: Path) -> None:
    run = RUN.but(strategy={"async_save": True}, trainer={"enable_checkpointing": True})
    with pytest.raises(RankError, match="everywhere"):
        run_ranks(_fail_on_all_ranks, 2, run, tmp_path)
    assert _names(tmp_path) == ["rescue.ckpt"]


def _save_over(path: Path, is_shared: bool = True) -> str:
    """What saving raises; ``is_shared`` says whether the ranks see the same disk."""
    from lightning_megatron.errors import CheckpointError

    if not is_shared:
        disk = path.parent / f"host{os.environ['RANK']}"
        disk.mkdir()
        os.chdir(disk)
        path = Path(path.name)
    with engine_run() as state:
        try:
            save(state, {}, path)
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_folder_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "notes.txt").touch()
    for message in run_ranks(_save_over, 2, results):
        assert message.startswith(f"checkpoint {results} is not written: {results} is a directory of other files")
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "notes.txt"]
    (results / "notes.txt").rename(tmp_path / "notes.txt")
    assert run_ranks(_save_over, 1, results) == [""]  # the folder is empty
    (results / ".DS_Store").touch()
    assert run_ranks(_save_over, 1, results) == [""]  # a checkpoint is replaced, whatever else somebody put into it


def test_hosts_that_share_no_disk_do_not_complete_a_checkpoint(tmp_path: Path) -> None:
    for message in run_ranks(_save_over, 2, tmp_path / "a.ckpt", False):
        expected = r"checkpoint a.ckpt is not written: rank 0 does not see (__1_\d.distcp|rng_00001.pt), as another"
        assert re.match(expected, message), message
        assert "on a file system that all hosts share" in message
    assert not list(tmp_path.glob("*/a.ckpt"))
