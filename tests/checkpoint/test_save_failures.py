"""A failed save is a warning: the run continues, no checkpoint is removed, and the next save is tried as usual."""

import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    Run,
    callback,
    checkpoints_at,
    engine_run,
    fit,
    names_in,
    save,
    train_with_checkpoints,
)
from tests.marks import exhaustive
from tests.ranks import RankError, run_ranks
from tests.recording import recorded_warnings

RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 4})


def _full_disk(
    victim: int,
    first: int,
    last: int,
    seen: dict[int, list[str]],
    folder: Path,
) -> Any:
    """Callback that limits file sizes, like a full disk, during the saves of steps ``first`` to ``last``."""

    def limit(trainer: Any, *_: Any) -> None:
        # Otherwise timing would decide which save meets the limit.
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
    return sorted(
        path.name for path in folder.iterdir() if path.suffix == ".ckpt" and path.exists()
    )


def _train_on_a_full_disk(
    run: Run,
    folder: Path,
    victim: int,
    steps: tuple[int, int],
) -> Any:
    """Steps taken, checkpoints before each step, and warnings."""
    seen: dict[int, list[str]] = {}
    disk = _full_disk(victim, *steps, seen, folder)
    with recorded_warnings("is not written") as texts:
        try:
            _, trace = fit(run, disk, checkpoints_at(folder, save_top_k=1))
        finally:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
    return list(trace.steps), seen, texts


@pytest.mark.parametrize(
    ("victim", "async_save"),
    [exhaustive(0, False), (1, True)],
    ids=["rank 0", "rank 1, async"],
)
def test_full_disk_warns_and_keeps_the_older_checkpoint(
    tmp_path: Path, victim: int, async_save: bool
) -> None:
    run = RUN.but(strategy={"async_save": async_save})

    results = run_ranks(_train_on_a_full_disk, 2, run, tmp_path, victim, (2, 3))

    for steps, seen, _ in results:
        assert steps == [1, 2, 3, 4]
        assert seen == {0: [], 1: ["step=1.ckpt"], 2: ["step=1.ckpt"], 3: ["step=1.ckpt"]}
    texts = results[0][2]
    for step, text in zip((2, 3), texts, strict=True):
        assert text.split()[1] == f"{tmp_path}/step={step}.ckpt"
        assert "the next save is tried as usual" in text
    assert results[1][2] == []
    assert names_in(tmp_path) == ["step=4.ckpt"]


def _train_with_unserializable_state(run: Run, folder: Path) -> None:
    fit(run, callback(state_dict=lambda: {"path": object()}), checkpoints_at(folder))


def _train_below_a_file(run: Run, folder: Path) -> None:
    (folder / "file").touch()
    train_with_checkpoints(run, folder / "file" / "below")


@pytest.mark.parametrize(
    ("train", "arguments", "message", "left"),
    [
        (_train_on_a_full_disk, (1, (4, 4)), "step=4.ckpt is not written", ["step=3.ckpt"]),
        (_train_with_unserializable_state, (), "its state must be plain data", []),
        (
            _train_below_a_file,
            (),
            r"cannot be saved in \S+file/below: \S+file is not a directory; give",
            ["file"],
        ),
    ],
    ids=["last save", "unserializable state", "directory that cannot be made"],
)
def test_fatal_save_failures_end_the_run(
    tmp_path: Path,
    train: Any,
    arguments: tuple[Any, ...],
    message: str,
    left: list[str],
) -> None:
    run = RUN.but(strategy={"async_save": True})
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(train, 2, run, tmp_path, *arguments)
    assert caught.value.error_type == "CheckpointError"
    assert names_in(tmp_path) == left


def _raise_at_step_3(error: Exception, rank: int | None = None) -> Any:
    def fail(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and rank in (None, trainer.global_rank):
            raise error

    return callback(on_train_batch_start=fail)


def _fail_on_one_rank(run: Run, folder: Path) -> None:
    """Raise a user's mistake on rank 1 alone while a save is in progress."""
    from datetime import timedelta

    import lightning.pytorch as pl

    from lightning_megatron import DataError
    from lightning_megatron.checkpoint.save import Save
    from lightning_megatron.run import checkpointing

    Save.is_written = lambda self: False  # type: ignore[method-assign]
    checkpointing._FAILURE_WAIT = timedelta(seconds=1)

    fit(
        run,
        _raise_at_step_3(DataError("a bad sample"), rank=1),
        pl.callbacks.OnExceptionCheckpoint(folder, "rescue"),
        checkpoints_at(folder, save_top_k=1),
    )


def test_a_rank_that_fails_alone_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    run = RUN.but(
        strategy={"tp": 1, "async_save": True},
        trainer={"enable_checkpointing": True},
    )
    with pytest.raises(RankError, match="a bad sample") as caught:
        run_ranks(_fail_on_one_rank, 2, run, tmp_path, timeout=60)
    assert (caught.value.rank, caught.value.error_type) == (1, "DataError")
    assert "rescue.ckpt is not written: not all ranks have failed" in str(caught.value)
    assert _names(tmp_path) == ["step=2.ckpt"]


def _fail_on_all_ranks(run: Run, folder: Path) -> None:
    import lightning.pytorch as pl

    fit(
        run,
        _raise_at_step_3(RuntimeError("everywhere")),
        pl.callbacks.OnExceptionCheckpoint(folder, "rescue"),
    )


def test_on_exception_checkpoint_saves_if_all_ranks_fail(tmp_path: Path) -> None:
    run = RUN.but(
        strategy={"async_save": True},
        trainer={"enable_checkpointing": True},
    )
    with pytest.raises(RankError, match="everywhere"):
        run_ranks(_fail_on_all_ranks, 2, run, tmp_path)
    assert _names(tmp_path) == ["rescue.ckpt"]


def _save_over(path: Path, is_shared: bool = True) -> str:
    """Save to ``path``, which each rank has on a disk of its own unless ``is_shared``; return the error."""
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


def test_directory_of_other_files_is_not_replaced(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "notes.txt").touch()
    for message in run_ranks(_save_over, 2, results):
        assert message.startswith(
            f"checkpoint {results} is not written: {results} is a directory of other files"
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["results", "notes.txt"]
    (results / "notes.txt").rename(tmp_path / "notes.txt")
    assert run_ranks(_save_over, 1, results) == [""]  # an empty directory
    (results / ".DS_Store").touch()
    assert run_ranks(_save_over, 1, results) == [""]  # a checkpoint with foreign files in it


def test_nodes_without_a_shared_disk_complete_no_checkpoint(tmp_path: Path) -> None:
    for message in run_ranks(_save_over, 2, tmp_path / "a.ckpt", False):
        expected = r"checkpoint a.ckpt is not written: rank 0 does not see (__1_\d.distcp|rng_00001.pt), as another"
        assert re.match(expected, message), message
        assert "on a file system that all hosts share" in message
    assert not list(tmp_path.glob("*/a.ckpt"))
