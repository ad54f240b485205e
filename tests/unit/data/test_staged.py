"""Does a dataset appear whole or not at all, and are only dead runs' remains removed?"""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.formats.mmap import IndexedDatasetWriter, check_dataset
from lightning_megatron.errors import DataError
from tests.ranks import ROOT

_WRITE_FOR_EVER = """
import sys, time
import numpy as np
from lightning_megatron.data.formats.mmap import IndexedDatasetWriter
with IndexedDatasetWriter(sys.argv[1], np.dtype("<u2")) as writer:
    writer.add_documents(bytes(200_000), [100_000])
    print("writing", flush=True)
    time.sleep(60)
"""


def _write(prefix: Path, num_tokens: int = 3) -> None:
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        writer.add_documents(bytes(2 * num_tokens), [num_tokens])


def _write_in_small_pieces(prefix: Path) -> None:
    """200,000 bytes of .bin, 20 bytes a sequence in .idx."""
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        for _ in range(10_000):
            writer.add_documents(bytes(20), [10])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def start_writer() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that holds an unfinished dataset at a prefix."""
    started = []

    def start(prefix: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WRITE_FOR_EVER, str(prefix)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_run_left_is_removed_and_what_lives_is_not(
    tmp_path: Path, start_writer: Callable[[Path], subprocess.Popen[str]]
) -> None:
    killed, living = start_writer(tmp_path / "a[1]*"), start_writer(tmp_path / "a[1]*")
    assert _names(tmp_path) == sorted(_left_by(tmp_path, killed) + _left_by(tmp_path, living))
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert len(_left_by(tmp_path, killed)) == 1

    _write(tmp_path / "other")
    assert len(_left_by(tmp_path, killed)) == 1  # of another dataset
    _write(tmp_path / "a[1]*")

    assert _names(tmp_path) == sorted([*_left_by(tmp_path, living), "a[1]*.bin", "a[1]*.idx", "other.bin", "other.idx"])
    assert len(_left_by(tmp_path, living)) == 1


def _left_by(folder: Path, process: subprocess.Popen[str]) -> list[str]:
    return [name for name in _names(folder) if name.startswith(".") and f".{process.pid}." in name]


class _FullDisk(io.FileIO):
    """Takes a number of bytes, and then none."""

    room = 0

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        if size > _FullDisk.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _FullDisk.room -= size
        return super().write(data)  # type: ignore[arg-type]


# In the midst of .bin, at its end, in .idx.
@pytest.mark.parametrize("room", [0, 150_000, 250_000, 200_010])
@pytest.mark.parametrize("was_there", [False, True])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, was_there: bool
) -> None:
    if was_there:
        _write(tmp_path / "x", 3)
    monkeypatch.setattr(
        "lightning_megatron.data.formats.staged.open",
        lambda path, mode: io.BufferedWriter(_FullDisk(path, mode)),
        raising=False,
    )
    monkeypatch.setattr(_FullDisk, "room", room)
    with pytest.raises(DataError, match=r"\.idx cannot be written \(No space left on device\); give an output prefix"):
        _write_in_small_pieces(tmp_path / "x")

    assert _names(tmp_path) == (["x.bin", "x.idx"] if was_there else [])
    if was_there:
        assert check_dataset(str(tmp_path / "x")).num_sequences == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/x\.bin and \.idx cannot be written \(File exists\)"):
        _write(tmp_path / "file" / "x")
    monkeypatch.setattr("lightning_megatron.data.formats.staged.open", read_only, raising=False)
    with pytest.raises(
        DataError, match=r"x\.bin and \.idx cannot be written \(Read-only file system\); give an output"
    ):
        _write(tmp_path / "x")
    assert _names(tmp_path) == ["file"]
