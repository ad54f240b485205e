"""Atomic publication: a name always refers to a complete file or directory; locks protect active writers."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from lightning_megatron.checkpoint.save import _start_partial
from lightning_megatron.errors import CheckpointError, DataError
from lightning_megatron.storage import publish as publishing
from lightning_megatron.storage.locks import FolderLock
from lightning_megatron.storage.paths import open_new, open_to_append
from lightning_megatron.storage.publish import publish, staged
from tests.checkpoint.runs import names_in


def _folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "meta.pt").write_text(content)
    return path


@pytest.fixture(params=["exchange", "two renames"])
def _exchange_method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(publishing, "_exchange", lambda a, b: False)


@pytest.mark.usefixtures("_exchange_method")
@pytest.mark.parametrize("old", ["nothing", "folder", "file", "link"])
def test_publish_replaces_a_file_directory_or_link(tmp_path: Path, old: str) -> None:
    path = tmp_path / "a.ckpt"
    _folder(tmp_path / "b.ckpt", "other")
    if old == "folder":
        _folder(path, "old")
    elif old == "file":
        path.write_text("old")
    elif old == "link":
        path.symlink_to("b.ckpt")

    publish(_folder(tmp_path / "a.ckpt.partial", "new"), path)
    publishing.wait_for_deletions()

    assert names_in(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert not path.is_symlink()
    assert (path / "meta.pt").read_text() == "new"
    assert (tmp_path / "b.ckpt" / "meta.pt").read_text() == "other"


def test_only_leftovers_of_killed_programs_are_deleted(tmp_path: Path) -> None:
    own = _folder(tmp_path / "a.ckpt.partial", "half")
    _folder(tmp_path / "b.ckpt.partial", "half")
    _folder(tmp_path / "c.ckpt.removed", "half")
    active = _folder(tmp_path / "d.ckpt.partial", "of a running program")
    (tmp_path / "e.ckpt.partial").mkdir()  # just created
    _folder(tmp_path / "f.ckpt", "complete")
    _folder(tmp_path / "g.partial", "no checkpoint")
    active_lock = FolderLock(active)

    lock = _start_partial(tmp_path / "a.ckpt")

    assert names_in(own) == []
    assert names_in(tmp_path) == [
        "a.ckpt.partial",
        "d.ckpt.partial",
        "e.ckpt.partial",
        "f.ckpt",
        "g.partial",
    ]
    active_lock.release()
    with pytest.raises(
        CheckpointError, match="another program is writing .*a.ckpt.partial at this moment"
    ):
        _start_partial(tmp_path / "a.ckpt")
    assert lock is not None
    lock.release()


# ---- staged ---------------------------------------------------------------------------------------------------------


def test_staged_files_are_replaced_with_the_marker_file_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.bin", "a.idx", "b.idx"):
        (tmp_path / name).write_text("old")
    replaced: list[tuple[str, str]] = []
    replace = os.replace

    def record(source: Path, target: Path) -> None:
        replaced.append(
            (
                target.name,
                "".join(sorted(path.name for path in tmp_path.glob("a.*"))),
            )
        )
        replace(source, target)

    monkeypatch.setattr(os, "replace", record)
    with staged(tmp_path, "a", last=["a.idx"], error=DataError) as partial:
        (partial / "a.idx").write_text("new")
        (partial / "a.bin").write_text("new")
        assert (tmp_path / "a.idx").read_text() == "old"

    assert replaced == [("a.bin", "a.bin"), ("a.idx", "a.bin")]
    assert [(tmp_path / name).read_text() for name in names_in(tmp_path)] == ["new", "new", "old"]
    assert names_in(tmp_path) == ["a.bin", "a.idx", "b.idx"]


def _check_model(folder: Path, content: str) -> None:
    """Check that ``folder`` holds a model of that content, and nothing else."""
    assert names_in(folder) == ["model"]
    assert (folder / "model/meta.pt").read_text() == content


def test_staged_directory_replaces_the_old_one_only_on_success(tmp_path: Path) -> None:
    _folder(tmp_path / "model", "old")
    _folder(tmp_path / ".model.partial", "of a killed run")
    with contextlib.suppress(KeyError), staged(tmp_path, "model") as partial:
        assert names_in(partial) == []
        _folder(partial / "model", "half")
        raise KeyError
    _check_model(tmp_path, "old")
    with staged(tmp_path, "model") as partial:
        _folder(partial / "model", "new")
        with (
            pytest.raises(DataError, match="another program is writing"),
            staged(tmp_path, "model", error=DataError),
        ):
            raise AssertionError("it was staged")
    _check_model(tmp_path, "new")


def test_directory_replaced_inside_a_staged_one_is_not_published(tmp_path: Path) -> None:
    with staged(tmp_path, "model") as partial:
        _folder(partial / "model", "old")
        publishing._deleter.submit(time.sleep, 0.2)
        publish(_folder(partial / "model.partial", "new"), partial / "model")
    _check_model(tmp_path, "new")


def _refuse(folder: Path, message: str) -> None:
    """Check that nothing can be staged in ``folder``."""
    with (
        pytest.raises(DataError, match=message),
        staged(
            folder,
            "a",
            error=DataError,
        ),
    ):
        raise AssertionError("it was staged")


def test_unwritable_staged_directory_raises_the_given_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _refuse(tmp_path / "file", r"file/a cannot be written \(.*choose a writable")
    with (
        pytest.raises(CheckpointError, match="No space"),
        staged(tmp_path, "a", error=CheckpointError),
    ):
        raise OSError(28, "No space left on device")
    assert names_in(tmp_path) == ["file"]


def test_a_planted_staging_name_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = _folder(tmp_path / "victim", "mine")
    partial = tmp_path / ".a.partial"
    partial.symlink_to(victim)
    _refuse(tmp_path, "got a link or a file; remove it")
    partial.unlink()
    partial.write_text("a file")
    _refuse(tmp_path, "got a link or a file; remove it")

    partial.unlink()
    _folder(partial, "of somebody else")
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    monkeypatch.setattr(publishing, "_is_this_user", lambda owner, folder: False)
    _refuse(tmp_path, "expected a directory of this user")
    assert names_in(partial) == ["meta.pt"]
    monkeypatch.undo()

    (partial / "link").symlink_to(victim)
    (partial / "folder").mkdir()
    with staged(tmp_path, "a", error=DataError) as folder:
        assert names_in(folder) == []
    assert (victim / "meta.pt").read_text() == "mine"


def test_leftovers_that_are_links_are_left_alone(tmp_path: Path) -> None:
    victim = _folder(tmp_path / "victim", "mine")
    for name in ("a.ckpt.partial", "a.ckpt.removed", "a.ckpt.replaced"):
        (tmp_path / name).symlink_to(victim)
    publishing.remove_leftovers(tmp_path, "*.ckpt")
    publishing.remove(tmp_path / "a.ckpt")
    publish(_folder(tmp_path / "b.ckpt.partial", "new"), tmp_path / "a.ckpt")
    publishing.wait_for_deletions()
    assert (victim / "meta.pt").read_text() == "mine"


def test_a_new_file_replaces_links_and_opens_devices(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "link").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("link", "hard", "dangling", "new"):
        with open_new(tmp_path / name) as file:
            file.write("new")
        assert (tmp_path / name).read_text() == "new"
    (tmp_path / "rows").symlink_to(victim)
    for _ in range(2):
        with open_to_append(tmp_path / "rows") as file:
            file.write("row")
    assert (tmp_path / "rows").read_text() == "rowrow"
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
    with open_new(Path("/dev/null")) as file:
        file.write("nowhere")
    assert Path("/dev/null").is_char_device()
