"""A save beside training holds the run as it was when it began, and fails on all ranks alike."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.engine_runs import RUN, begin_save, change, content_of, engine_run, save
from tests.checkpoint.runs import differences, read_tensors
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _save_twice_beside_training(folder: Path) -> None:
    with engine_run(RUN) as state:
        save(state, {}, folder / "before.ckpt")
        saver = begin_save(state, {"save": 1}, folder / "first.ckpt")
        change(state)
        saver.save(state, {}, folder / "after.ckpt", is_final=False)  # finishes the first one first
        assert (folder / "first.ckpt").is_dir()
        saver.save(state, {"save": 2}, folder / "first.ckpt", is_final=False)
        change(state)
        saver.finish(is_final=True)
        saver.finish()
        saver.end()


def test_it_holds_the_run_as_it_was_when_the_save_began(tmp_path: Path) -> None:
    import torch

    run_ranks(_save_twice_beside_training, 2, tmp_path)

    before, after = read_tensors(tmp_path / "before.ckpt"), read_tensors(tmp_path / "after.ckpt")
    assert {name for name in differences(before, after) if "_extra_state" not in name} == before.keys()
    # ``first.ckpt`` was saved once with each state; what is there is the second.
    assert differences(after, read_tensors(tmp_path / "first.ckpt")) == []
    assert torch.load(tmp_path / "first.ckpt" / "meta.pt", weights_only=True)["lightning"]["save"] == 2
    for rank in range(2):
        name = f"rng_{rank:05d}.pt"
        assert (tmp_path / "first.ckpt" / name).read_bytes() == (tmp_path / "after.ckpt" / name).read_bytes()
    assert _names(tmp_path) == ["after.ckpt", "before.ckpt", "first.ckpt"]


def _train_while_it_is_written(path: Path) -> list[Any]:
    """Hold the disk up, look, train, let go, finish."""
    from lightning_megatron.checkpoint.save import _ChecksummedFile

    let_go = threading.Event()
    original = _ChecksummedFile.write
    with engine_run(RUN) as state, pytest.MonkeyPatch.context() as patch:
        save(state, {}, path.with_name("sync.ckpt"))
        patch.setattr(_ChecksummedFile, "write", lambda *args: let_go.wait(30) and original(*args))
        saver = begin_save(state, {}, path)
        change(state)
        found = [saver.saving.is_written(), path.exists()]
        let_go.set()
        while not saver.saving.is_written():
            time.sleep(0.01)
        found += [path.exists()]
        saver.finish()
        return [*found, path.exists()]


def test_it_has_its_name_only_after_it_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert run_ranks(_train_while_it_is_written, 2, path) == [[False, False, False, True]] * 2
    assert differences(read_tensors(tmp_path / "sync.ckpt"), read_tensors(path)) == []


def _fail(path: Path, victim: int, *, in_thread: bool) -> list[Any]:
    """A full disk on one rank: of what threads write, or of what rank 0 writes at the end."""
    import torch.distributed as dist

    from lightning_megatron.checkpoint.save import FileSystemWriter, _ChecksummedFile
    from lightning_megatron.errors import CheckpointError

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine_run(RUN) as state:
        save(state, {"save": "old"}, path)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == victim:
                patch.setattr(*((_ChecksummedFile, "write") if in_thread else (FileSystemWriter, "finish")), full)
            saver = begin_save(state, {"save": "new"}, path)
            try:
                saver.finish(is_final=True)
                message = ""
            except CheckpointError as error:
                message = str(error)
        dist.barrier()
        content, names = content_of(path), _names(path.parent)
        begin_save(state, {"save": "newer"}, path).finish(is_final=True)
        return [message, content["save"], names, content_of(path)["save"]]


@pytest.mark.parametrize(("victim", "in_thread"), [(1, True), (0, False)])
def test_a_full_disk_is_an_error_of_finish_on_all_ranks(tmp_path: Path, victim: int, in_thread: bool) -> None:
    path = tmp_path / "a.ckpt"
    for message, meta, names, newer in run_ranks(_fail_in_thread if in_thread else _fail_at_the_end, 2, path, victim):
        assert message.startswith(f"checkpoint {path} is not written: [Errno 28] No space left on device")
        assert meta == "old"
        assert names == ["a.ckpt"]
        assert newer == "newer"


def _fail_in_thread(path: Path, victim: int) -> list[Any]:
    return _fail(path, victim, in_thread=True)


def _fail_at_the_end(path: Path, victim: int) -> list[Any]:
    return _fail(path, victim, in_thread=False)


def _abandon(path: Path) -> list[Any]:
    """Once by the run itself, and once as at the end of a program whose disk is slow."""
    import torch.distributed as dist

    from lightning_megatron.checkpoint import save as module

    original = module._ChecksummedFile.write
    with engine_run(RUN) as state, pytest.MonkeyPatch.context() as patch:
        save(state, {"save": "old"}, path)
        with pytest.warns(UserWarning, match="is not written") if os.environ["RANK"] == "0" else nullcontext():
            begin_save(state, {"save": "new"}, path).abandon()
        dist.barrier()
        names = _names(path.parent)
        slow = lambda *args: time.sleep(0.1) or original(*args)  # type: ignore[func-returns-value]  # noqa: E731
        patch.setattr(module._ChecksummedFile, "write", slow)
        saver = begin_save(state, {"save": "newer"}, path)
        start = time.monotonic()
        module._abandon_all()
        seconds = time.monotonic() - start
        assert saver.saving is not None
        return [names, content_of(path)["save"], seconds]


def test_an_abandoned_save_leaves_the_old_checkpoint_and_ends_at_once(tmp_path: Path) -> None:
    for names, content, seconds in run_ranks(_abandon, 2, tmp_path / "a.ckpt"):
        assert names == ["a.ckpt"]
        assert content == "old"
        assert seconds < 2  # one piece, of dozens
