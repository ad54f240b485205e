"""The files are Megatron's byte for byte, appear whole or not at all, and no damage gets past the checks."""

from __future__ import annotations

import errno
import functools
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data import indexed
from lightning_megatron.data.indexed import (
    MAGIC,
    OLD_MAGIC,
    IndexedDataset,
    IndexedDatasetWriter,
    check_dataset,
    open_dataset,
)
from lightning_megatron.errors import DataError
from tests.unit.data.indexed_files import build, longs

check_any = functools.partial(check_dataset, for_training=False)

# Documents of sequences; an empty document and empty sequences are among them.
DOCUMENTS = [[[5], [1, 2]], [], [[3]], [[], [4, 5, 6]], [[7], []], [[8, 9]]]

# Three sequences in three documents, assembled by hand from the descriptions of the formats.
NEW_IDX = MAGIC + struct.pack("<QBQQ3i", 1, 8, 3, 4, 3, 1, 2) + longs(0, 6, 8) + longs(0, 1, 2, 3)
NEW_BIN = struct.pack("<6H", 5, 6, 7, 65535, 1, 2)
OLD_IDX = OLD_MAGIC + longs(1, 4, 4, 3, 3, 4) + longs(0, 1, 2, 3) + longs(0, 3, 4, 6) + longs(3, 1, 2, 0, 1, 2, 3)
OLD_BIN = struct.pack("<6i", 5, 6, 7, 65535, 1, 2)
OLDEST_IDX = OLD_IDX[:48] + longs(0, 1, 2, 3) + longs(0, 3, 3, 6) + longs(3, 0, 3)
SOUND: dict[str, tuple[bytes, bytes, Callable[[str], IndexedDataset]]] = {
    "mmap": (NEW_IDX, NEW_BIN, check_dataset),
    "old": (OLD_IDX, OLD_BIN, check_any),
    "oldest": (OLDEST_IDX, OLD_BIN, check_any),
}


def _write(prefix: Path, sizes: list[int], times: int = 1) -> None:
    """Documents of one sequence of zeros each."""
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        for _ in range(times):
            writer.add_documents(bytes(2 * sum(sizes)), sizes)


def _files(folder: Path, idx: bytes = NEW_IDX, data: bytes = NEW_BIN) -> str:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(data)
    return str(folder / "x")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["u1", "<i4", "<f8", "<u2"])
def test_written_files_equal_those_of_the_engines_builder(tmp_path: Path, dtype: str) -> None:
    one_each = [[[number, 1, 2][: 1 + number % 3]] for number in range(20)]
    build(tmp_path / "theirs", one_each + DOCUMENTS, dtype)
    with IndexedDatasetWriter(str(tmp_path / "ours"), np.dtype(dtype)) as writer:
        flat = [token for (tokens,) in one_each for token in tokens]
        writer.add_documents(np.array(flat, dtype).tobytes(), [len(tokens) for (tokens,) in one_each])
        for document in DOCUMENTS:
            flat, lengths = [token for each in document for token in each], [len(each) for each in document]
            writer.add_documents(np.array(flat, dtype).tobytes(), lengths, [len(lengths)])

    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert check_dataset(str(tmp_path / "ours"), for_training=False).num_documents == 26


def test_a_dataset_gives_runs_of_sequences_and_travels_by_its_name(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path / "x", DOCUMENTS))
    sent = pickle.dumps(dataset)

    assert len(sent) < 200
    tokens, lengths = pickle.loads(sent).sequences(1, 6)
    assert (tokens.tolist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6, 7], [2, 1, 0, 3, 1])
    (tmp_path / "x.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match=r"x\.idx accounts for 20 bytes, and \.bin has 4: damaged"):
        open_dataset(dataset.prefix).sequences(1, 6)


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
@pytest.mark.parametrize("room", [0, 150_000, 200_010])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    _write(tmp_path / "x", [3])
    monkeypatch.setattr(indexed, "open", lambda path, mode: io.BufferedWriter(_FullDisk(path, mode)), raising=False)
    monkeypatch.setattr(_FullDisk, "room", room)
    for name in ("x", "new"):
        with pytest.raises(DataError, match=r"cannot be written \(.*No space left on device\); choose a folder"):
            _write(tmp_path / name, [10], times=10_000)  # 200,000 bytes of .bin, 20 bytes a sequence in .idx

    assert _names(tmp_path) == ["x.bin", "x.idx"]
    assert check_dataset(str(tmp_path / "x")).lengths.tolist() == [3]


def test_missing_files_and_suffixes_are_named(tmp_path: Path) -> None:
    for check in (check_dataset, check_any):
        with pytest.raises(DataError, match=r"needs two files, missing: \S+x\.idx, \S+x\.bin; give the prefix"):
            check(str(tmp_path / "x"))
        with pytest.raises(DataError, match=r"it must be the prefix; write \S+/x$"):
            check(str(tmp_path / "x.bin"))


def _changed(idx: bytes, offset: int, letters: str, *values: int) -> bytes:
    data = struct.pack(f"<{letters}", *values)
    return idx[:offset] + data + idx[offset + len(data) :]


@pytest.mark.parametrize(
    ("check", "idx", "message"),
    [
        (check_dataset, NEW_IDX[:20], "has 20 bytes, its header alone needs 34: damaged, .*; run preprocess again"),
        (check_dataset, b"PK\x03\x04" * 30, "begins with .*: damaged, truncated or foreign"),
        (check_dataset, _changed(NEW_IDX, 9, "Q", 2), "says version 2"),
        (check_dataset, _changed(NEW_IDX, 17, "B", 7), r"token type 7 \(floating-point tokens\)"),
        (check_dataset, _changed(NEW_IDX, 34, "i", -3), r"a sequence of -3 tokens, \.bin has 12 bytes: damaged"),
        (check_dataset, _changed(NEW_IDX, 54, "q", 4), "at position 4, the lengths before add up to 6"),
        (check_dataset, _changed(NEW_IDX, 42, "i", 1), r"x\.idx accounts for 10 bytes, and \.bin has 12"),
        (check_dataset, _changed(NEW_IDX, 94, "q", 2), "has document bounds that do not ascend from 0 to the 3 seq"),
        (check_any, _changed(OLD_IDX, 24, "q", 8), "token type 4 of 8 bytes, there are 1 of 1, .*6 of 4, 6"),
        (check_any, _changed(OLD_IDX, 112, "q", 5), "ends at element 5, and .bin elsewhere"),
    ],
)
def test_damage_is_named(tmp_path: Path, check: Callable[[str], IndexedDataset], idx: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(_files(tmp_path, idx, NEW_BIN if check is check_dataset else OLD_BIN))


def test_a_dataset_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="x holds no token; preprocess inputs that contain text"):
        check_dataset(_files(tmp_path, NEW_IDX[:18] + struct.pack("<QQiqqq", 1, 2, 0, 0, 0, 1), b""))


def _refusal(read: Callable[[str], object], prefix: str) -> str | None:
    """What the error says, which names the dataset; None if there is none."""
    try:
        read(prefix)
    except DataError as error:
        message = str(error)
    else:
        return None
    assert prefix in message
    return message


@pytest.mark.parametrize("name", SOUND)
def test_every_truncation_and_every_flipped_bit_is_refused_or_harmless(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 2)  # so that what is damaged may be at the edge of a chunk
    idx, data, check = SOUND[name]
    prefix = _files(tmp_path, idx, data)
    assert len(check(prefix).lengths) == 3
    for size in range(len(idx)):
        assert _refusal(check, _files(tmp_path, idx[:size], data)) is not None
    for size in range(len(data)):
        assert _refusal(check, _files(tmp_path, idx, data[:size])) is not None
    (tmp_path / "x.bin").write_bytes(data)
    accepted = 0
    for bit in range(8 * len(idx)):
        damaged = bytearray(idx)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.idx").write_bytes(damaged)
        accepted += _refusal(check, prefix) is None
    # Another type of as many bytes, other bounds in order: nothing in the files contradicts them.
    assert accepted <= 2
