"""The files are Megatron's byte for byte, appear whole or not at all, and no damage gets past the checks."""

from __future__ import annotations

import errno
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import indexed
from lightning_megatron.data.describe import describe_dataset
from lightning_megatron.data.indexed import (
    MAGIC,
    OLD_MAGIC,
    IndexedDataset,
    IndexedDatasetWriter,
    check_dataset,
    open_dataset,
)
from lightning_megatron.data.merge import check_any_dataset, merge_datasets
from lightning_megatron.data.old_formats import check_old_dataset
from lightning_megatron.errors import DataError
from tests.unit.data.indexed_files import build, longs

# Documents of sequences; an empty document and empty sequences are among them.
DOCUMENTS = [[[5], [1, 2]], [], [[3]], [[], [4, 5, 6]], [[7], []], [[8, 9]]]

# Three sequences in three documents, assembled by hand from the descriptions of the formats.
NEW_IDX = MAGIC + struct.pack("<QBQQ3i", 1, 8, 3, 4, 3, 1, 2) + longs(0, 6, 8) + longs(0, 1, 2, 3)
NEW_BIN = struct.pack("<6H", 5, 6, 7, 65535, 1, 2)
OLD_IDX = OLD_MAGIC + longs(1, 4, 4, 3, 3, 4) + longs(0, 1, 2, 3) + longs(0, 3, 4, 6) + longs(3, 1, 2, 0, 1, 2, 3)
OLD_BIN = struct.pack("<6i", 5, 6, 7, 65535, 1, 2)
OLDEST_IDX = OLD_IDX[:48] + longs(0, 1, 2, 3) + longs(0, 3, 3, 6) + longs(3, 0, 3)
# Index, tokens, check; offset and struct's letter of each field of the header, and of one element of each array.
SOUND: dict[str, tuple[bytes, bytes, Callable[[str], IndexedDataset], list[tuple[int, str]]]] = {
    "mmap": (
        *(NEW_IDX, NEW_BIN, check_dataset),
        [(9, "Q"), (17, "B"), (18, "Q"), (26, "Q"), (38, "I"), (54, "Q"), (78, "Q"), (94, "Q")],
    ),
    "old": (*(OLD_IDX, OLD_BIN, check_old_dataset), [(8 * i, "Q") for i in (1, 2, 3, 4, 5, 6, 8, 12, 15, 19, 21)]),
    "oldest": (*(OLDEST_IDX, OLD_BIN, check_old_dataset), [(8 * i, "Q") for i in (1, 2, 3, 4, 5, 6, 7, 11, 15)]),
}
SPECIAL = [0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


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
    assert check_dataset(str(tmp_path / "ours"), integers_only=False).num_documents == 26


def test_a_dataset_gives_runs_of_sequences_and_travels_by_its_name(tmp_path: Path) -> None:
    dataset = open_dataset(build(tmp_path / "x", DOCUMENTS))
    sent = pickle.dumps(dataset)

    assert len(sent) < 200
    tokens, lengths = pickle.loads(sent).sequences(1, 6)
    assert (tokens.tolist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6, 7], [2, 1, 0, 3, 1])
    (tmp_path / "x.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match=r"x\.idx points outside of \.bin or between tokens; run preprocess again"):
        open_dataset(dataset.prefix).sequences(1, 6)


def test_what_a_living_writer_has_begun_is_left_alone_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    with IndexedDatasetWriter(str(tmp_path / "x"), np.dtype("<u2")) as writer:
        with pytest.raises(DataError, match=r"another program is writing \S+\.x\.partial at this moment"):
            _write(tmp_path / "x", [3])
        writer.add_documents(bytes(2), [1])
        assert _names(tmp_path) == [".x.partial"]
    assert check_dataset(str(tmp_path / "x")).lengths.tolist() == [1]
    (tmp_path / ".x.partial").mkdir()
    (tmp_path / ".x.partial" / "x.bin").write_bytes(bytes(100))

    _write(tmp_path / "x", [3])

    assert _names(tmp_path) == ["x.bin", "x.idx"]
    assert check_dataset(str(tmp_path / "x")).lengths.tolist() == [3]


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
    for check in (check_dataset, check_old_dataset):
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
        (check_dataset, NEW_IDX[:20], "has 20 bytes, its header alone needs 34: truncated; run preprocess again"),
        (check_dataset, OLD_IDX, r"old cached/lazy format \(TNTIDX\).*run: lightning-megatron convert-dataset"),
        (check_dataset, _changed(NEW_IDX, 9, "Q", 2), "says version 2"),
        (check_dataset, _changed(NEW_IDX, 17, "B", 7), r"token type 7 \(floating-point tokens\)"),
        (check_dataset, _changed(NEW_IDX, 34, "i", -3), r"a sequence of -3 tokens, \.bin has 12 bytes: damaged, or"),
        (check_dataset, _changed(NEW_IDX, 54, "q", 4), "at position 4, the lengths before it add up to 6"),
        (check_dataset, _changed(NEW_IDX, 42, "i", 1), r"x\.bin has 12 bytes, x\.idx accounts for 10: \.bin is trunca"),
        (check_dataset, _changed(NEW_IDX, 94, "q", 2), "ends its last document at sequence 2 of 3"),
        (check_old_dataset, NEW_IDX, r"is in the mmap format \(MMIDIDX\) already; use"),
        (check_old_dataset, b"PK\x03\x04" * 30, "foreign file; copy both files again"),
        (check_old_dataset, _changed(OLD_IDX, 24, "q", 8), "token type 4 of 8 bytes, there are 1 of 1, .*6 of 4, 6"),
        (check_old_dataset, _changed(OLD_IDX, 112, "q", 5), "ends at element 5, and .bin elsewhere"),
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


def _read_all(prefix: str) -> None:
    """Whatever is accepted can be read in full, each byte of .bin once; all else is a DataError."""
    data = Path(prefix + ".bin").read_bytes()
    if _refusal(lambda path: check_any_dataset(path, "input"), prefix) is not None:
        for read in (describe_dataset, lambda path: merge_datasets([path], path + "_new")):
            assert _refusal(read, prefix) is not None
        assert _names(Path(prefix).parent) == ["x.bin", "x.idx"]
        return
    dataset = check_any_dataset(prefix, "input")
    report = describe_dataset(prefix, num_documents=10**20)
    assert report["tokens"] == dataset.lengths.sum() == len(data) // dataset.dtype.itemsize
    tokens = [token for each in report.get("first_documents", ()) for token in each["tokens"]]
    assert np.array(tokens, dtype=dataset.dtype).tobytes() == data
    merged = merge_datasets([prefix], prefix + "_new")
    assert Path(merged.prefix + ".bin").read_bytes() == data


@pytest.mark.parametrize("name", SOUND)
def test_every_truncation_and_every_flipped_bit_is_refused_or_harmless(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 2)  # so that what is damaged may be at the edge of a chunk
    idx, data, check, _ = SOUND[name]
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


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(list(SOUND)),
    cut=st.integers(0, len(OLD_IDX)) | st.none(),
    changes=st.dictionaries(st.integers(0, len(OLD_IDX) - 1), st.integers(0, 255), max_size=6),
    words=st.dictionaries(st.integers(0, 10), st.integers(0, 2**64 - 1) | st.sampled_from(SPECIAL), max_size=3),
    tail=st.binary(max_size=200),
)
def test_any_damage_is_either_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    cut: int | None,
    changes: dict[int, int],
    words: dict[int, int],
    tail: bytes,
) -> None:
    idx, data, _, fields = SOUND[name]
    damaged = bytearray(idx)
    for place, word in words.items():
        offset, letter = fields[place % len(fields)]
        field = struct.pack("<Q", word)[: struct.calcsize(letter)]
        damaged[offset : offset + len(field)] = field
    for offset, value in changes.items():
        damaged[offset % len(damaged)] = value
    # Whole files more often than not: one of another length is refused before anything else is looked at.
    _read_all(_files(tmp_path_factory.mktemp("fuzz"), bytes(damaged if cut is None else damaged[:cut] + tail), data))
