"""Publishing of files and folders: a complete one always has the name, and what others write is left alone."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from lightning_megatron import files
from lightning_megatron.checkpoint.save import _start_partial
from lightning_megatron.errors import CheckpointError, DataError
from lightning_megatron.files import FolderLock, publish, staged


def _folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "meta.pt").write_text(content)
    return path


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("old", ["nothing", "folder", "file", "link"])
def test_the_new_folder_replaces_whatever_has_the_name(tmp_path: Path, old: str) -> None:
    path = tmp_path / "a.ckpt"
    _folder(tmp_path / "b.ckpt", "other")
    if old == "folder":
        _folder(path, "old")
    elif old == "file":
        path.write_text("old")
    elif old == "link":
        path.symlink_to("b.ckpt")

    publish(_folder(tmp_path / "a.ckpt.partial", "new"), path)
    files.wait_for_deletions()

    assert _names(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert not path.is_symlink()
    assert (path / "meta.pt").read_text() == "new"
    assert (tmp_path / "b.ckpt" / "meta.pt").read_text() == "other"


def test_left_overs_of_killed_programs_are_cleared_and_others_are_not(tmp_path: Path) -> None:
    own = _folder(tmp_path / "a.ckpt.partial", "half")
    _folder(tmp_path / "b.ckpt.partial", "half")
    _folder(tmp_path / "c.ckpt.removed", "half")
    active = _folder(tmp_path / "d.ckpt.partial", "of a program that runs")
    (tmp_path / "e.ckpt.partial").mkdir()  # has just been made
    _folder(tmp_path / "f.ckpt", "whole")
    _folder(tmp_path / "g.partial", "no checkpoint")
    others = FolderLock(active)

    lock = _start_partial(tmp_path / "a.ckpt")

    assert _names(own) == []
    assert _names(tmp_path) == ["a.ckpt.partial", "d.ckpt.partial", "e.ckpt.partial", "f.ckpt", "g.partial"]
    others.release()
    with pytest.raises(CheckpointError, match="another program is writing .*a.ckpt.partial at this moment"):
        _start_partial(tmp_path / "a.ckpt")
    lock.release()


# ---- staged ---------------------------------------------------------------------------------------------------------


def test_staged_files_appear_together_and_the_last_one_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "a.idx", "b.idx"):
        (tmp_path / name).write_text("old")
    seen: list[tuple[str, str]] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((target.name, "".join(sorted(each.name for each in tmp_path.glob("a.*")))))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    with staged(tmp_path, "a", last=["a.idx"], error=DataError) as partial:
        (partial / "a.idx").write_text("new")
        (partial / "a.bin").write_text("new")
        assert (tmp_path / "a.idx").read_text() == "old"

    assert seen == [("a.bin", "a.bin"), ("a.idx", "a.bin")]
    assert [(tmp_path / name).read_text() for name in _names(tmp_path)] == ["new", "new", "old"]
    assert _names(tmp_path) == ["a.bin", "a.idx", "b.idx"]


def test_a_staged_folder_replaces_the_old_one_or_leaves_it(tmp_path: Path) -> None:
    _folder(tmp_path / "model", "old")
    _folder(tmp_path / ".model.partial", "of a killed run")
    with contextlib.suppress(KeyError), staged(tmp_path, "model") as partial:
        assert _names(partial) == []
        _folder(partial / "model", "half")
        raise KeyError
    assert (_names(tmp_path), (tmp_path / "model/meta.pt").read_text()) == (["model"], "old")
    with staged(tmp_path, "model") as partial:
        _folder(partial / "model", "new")
        with pytest.raises(DataError, match="another program is writing"), staged(tmp_path, "model", error=DataError):
            pass
    assert (_names(tmp_path), (tmp_path / "model/meta.pt").read_text()) == (["model"], "new")


def test_what_is_replaced_inside_a_staged_folder_is_not_published(tmp_path: Path) -> None:
    with staged(tmp_path, "model") as partial:
        _folder(partial / "model", "old")
        files._deleter.submit(time.sleep, 0.2)
        publish(_folder(partial / "model.partial", "new"), partial / "model")
    assert (_names(tmp_path), (tmp_path / "model/meta.pt").read_text()) == (["model"], "new")


def test_a_staged_folder_that_cannot_be_written_is_the_error_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"file/a cannot be written \(.*choose a writable"),
        staged(tmp_path / "file", "a", error=DataError),
    ):
        pass
    with pytest.raises(CheckpointError, match="No space"), staged(tmp_path, "a", error=CheckpointError):
        raise OSError(28, "No space left on device")
    assert _names(tmp_path) == ["file"]
