"""A complete checkpoint, old or new, survives SIGKILL at any moment of a save, a replacement or a removal.

The process is killed before one of its file-changing calls, chosen by a seed. The files left are read by torch's own
reader and compared, tensor by tensor, with the known old and new states.
"""

import itertools
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    Run,
    begin_save,
    callback,
    change,
    differences,
    engine_run,
    fit,
    names_in,
    read_tensors,
    save,
)
from tests.marks import exhaustive
from tests.ranks import RankError, run_ranks

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
"""Audit events of Python that precede a change of file names."""

_random = random.Random(20)
MOMENTS = [
    (kind, rank, _random.random())
    for kind, rank, times in (
        ("save", 0, 4),
        ("save", 1, 2),
        ("save beside training", 0, 4),
        ("save beside training", 1, 2),
        ("save without exchange", 0, 4),
        ("remove", 0, 4),
    )
    for _ in range(times)
]
"""Kind of operation, rank that is killed, and the fraction of its file-changing calls before that."""


class _Calls:
    """Counter of this process's file-changing calls that kills the process before a given one."""

    def __init__(self, folder: Path) -> None:
        from lightning_megatron.checkpoint.save import _ChecksummedFile
        from lightning_megatron.storage import publish

        self._folder = str(folder)
        self._counter = itertools.count(1)
        self.count = 0
        self.last: int | None = None
        sys.addaudithook(self._hook)
        for owner, name in (
            (_ChecksummedFile, "write"),
            (os, "fsync"),
            (publish, "_exchange"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def begin(self, last: int | None = None) -> None:
        """Restart the count; kill the process before call number ``last``."""
        self._counter = itertools.count(1)
        self.count = 0
        self.last = last

    def _hook(
        self,
        event: str,
        args: tuple[Any, ...],
    ) -> None:
        if event not in _EVENTS or self._folder not in str(args[0]):
            return
        if event != "open" or _changes(args[2]):
            self._count()

    def _counted(self, original: Any) -> Any:
        def call(*args: Any) -> Any:
            self._count()
            return original(*args)

        return call

    def _count(self) -> None:
        self.count = next(self._counter)
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def _changes(flags: int) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _act(
    kind: str,
    state: Any,
    path: Path,
    name: str,
) -> None:
    from lightning_megatron.storage import publish

    if kind == "remove":
        if int(os.environ["RANK"]) == 0:  # only rank 0 removes checkpoints in a run
            publish.remove(path)
    elif kind == "save beside training":
        begin_save(state, {"name": name}, path).finish()
    else:
        if kind == "save without exchange":
            publish._exchange = lambda a, b: False
        save(state, {"name": name}, path)
    publish.wait_for_deletions()


def _die_during(
    path: Path,
    kind: str,
    victim: int,
    share: float,
) -> None:
    """Save the old state under two names, count the calls of the operation, repeat it with the new state and die."""
    with engine_run() as state:
        save(state, {"name": "old"}, path.with_name("kept.ckpt"))
        save(state, {"name": "old"}, path)
        calls = _Calls(path.parent)
        _act(kind, state, path, "old")
        total = calls.count
        if kind == "remove":
            save(state, {"name": "old"}, path)
        change(state)
        is_victim = int(os.environ["RANK"]) == victim
        calls.begin(1 + int(share * total) if is_victim else None)
        _act(kind, state, path, "new")
        if is_victim:
            raise AssertionError(f"did not die before call {calls.last}, made {calls.count}")


def _save_old_and_new(folder: Path) -> None:
    with engine_run() as state:
        save(state, {}, folder / "old.ckpt")
        change(state)
        save(state, {}, folder / "new.ckpt")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("known")
    run_ranks(_save_old_and_new, 2, folder)
    return {name: read_tensors(folder / f"{name}.ckpt") for name in ("old", "new")}


def _known_name(path: Path, known: dict[str, dict[str, Any]]) -> str:
    """Name of the known state that a checkpoint holds, after checking its checksums and tensors."""
    import torch

    from lightning_megatron.storage.checksums import CHECKSUMS, verify_checksums

    assert (path / CHECKSUMS).is_file()
    verify_checksums(path)
    name: str = torch.load(path / "meta.pt", weights_only=True)["lightning"]["name"]
    assert differences(known[name], read_tensors(path)) == []
    return name


@pytest.mark.parametrize(
    ("kind", "victim", "share"),
    # The first of each operation and rank; the others only in exhaustive runs.
    [
        exhaustive(*moment) if moment[:2] in [each[:2] for each in MOMENTS[:index]] else moment
        for index, moment in enumerate(MOMENTS)
    ],
)
def test_a_complete_checkpoint_survives_sigkill(
    tmp_path: Path,
    known: dict[str, dict[str, Any]],
    kind: str,
    victim: int,
    share: float,
) -> None:
    from lightning_megatron.checkpoint.save import _start_partial
    from lightning_megatron.storage.publish import publish, recover, remove, wait_for_deletions

    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match=rf"rank {victim} died without a result"):
        run_ranks(_die_during, 2, path, kind, victim, share)

    assert _known_name(tmp_path / "kept.ckpt", known) == "old"
    found = recover(path)
    if kind == "remove":
        assert not found.exists() or _known_name(found, known) == "old"
    else:
        assert _known_name(found, known) in ("old", "new")
    # The next save under that name cleans up everything else.
    partial = tmp_path / "last.ckpt.partial"
    lock = _start_partial(path)
    (partial / "meta.pt").touch()
    publish(partial, path)
    wait_for_deletions()
    assert lock is not None
    lock.release()
    assert names_in(tmp_path) == ["kept.ckpt", "last.ckpt"]
    remove(path)
    wait_for_deletions()
    assert names_in(tmp_path) == ["kept.ckpt"]


def _train(
    run: Run,
    path: Path,
    *,
    dies: bool = False,
) -> int:
    """Save after each step under the same name, or die in the second save; return the first step."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_each_step(trainer: Any, *_: Any) -> None:
        if dies and trainer.global_step == 2:
            Path.replace = die  # type: ignore[assignment, method-assign]
        trainer.save_checkpoint(path)

    _, trace = fit(run, callback(on_train_batch_end=save_each_step))
    return min(trace.steps)


def _save_interrupted_twice(run: Run, path: Path) -> None:
    """Crash in a save after a crash between the two renames, which left the old checkpoint set aside."""
    _train(run.but(trainer={"max_steps": 1}), path)
    path.rename(path.with_name(path.name + ".replaced"))
    _train(run.but(ckpt_path=str(path)), path, dies=True)


def test_resume_after_two_crashes_finds_the_only_complete_checkpoint(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 3})
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(_save_interrupted_twice, 1, run, path)

    assert not path.exists()
    assert run_ranks(_train, 1, run.but(ckpt_path=str(path)), path) == [2]
    assert names_in(tmp_path) == ["last.ckpt"]
