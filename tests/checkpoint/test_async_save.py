"""A save beside training holds the run as it was when it began, and fails on all ranks alike."""

from __future__ import annotations

import time
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
        first = begin_save(state, {"save": 1}, folder / "first.ckpt")
        change(state)
        first.finish()
        save(state, {}, folder / "after.ckpt")
        again = begin_save(state, {"save": 2}, folder / "first.ckpt")
        change(state)
        again.finish()


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


def _abandon(path: Path) -> list[Any]:
    """Once by the run itself, and once as at the end of a program whose disk is slow."""
    import torch.distributed as dist

    from lightning_megatron.checkpoint import save as module

    original = module._ChecksummedFile.write
    with engine_run(RUN) as state, pytest.MonkeyPatch.context() as patch:
        save(state, {"save": "old"}, path)
        begin_save(state, {"save": "new"}, path).abandon()
        dist.barrier()
        names = _names(path.parent)
        dist.barrier()  # or another rank's next save is among the names
        slow = lambda *args: time.sleep(0.1) or original(*args)  # type: ignore[func-returns-value]  # noqa: E731
        patch.setattr(module._ChecksummedFile, "write", slow)
        _ = begin_save(state, {"save": "newer"}, path)
        start = time.monotonic()
        module._abandon_all()
        seconds = time.monotonic() - start
        return [names, content_of(path)["save"], seconds]


def test_an_abandoned_save_leaves_the_old_checkpoint_and_ends_at_once(tmp_path: Path) -> None:
    for names, content, seconds in run_ranks(_abandon, 2, tmp_path / "a.ckpt"):
        assert names == ["a.ckpt"]
        assert content == "old"
        assert seconds < 2  # one piece, of dozens
