"""Are the files Megatron's, byte for byte, and is every damage recognised before the engine maps them?"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.formats.mmap import (
    IndexedDatasetWriter,
    check_dataset,
)
from lightning_megatron.errors import DataError

DOCUMENTS = [[5, 6, 7], [65535], [1, 2]]

# Assembled by hand from the description of the format.
GOLDEN_IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<Q", 1)
    + struct.pack("<B", 8)
    + struct.pack("<QQ", 3, 4)
    + struct.pack("<iii", 3, 1, 2)
    + struct.pack("<qqq", 0, 6, 8)
    + struct.pack("<qqqq", 0, 1, 2, 3)
)
GOLDEN_BIN = struct.pack("<HHHHHH", 5, 6, 7, 65535, 1, 2)


def _write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> None:
    with IndexedDatasetWriter(str(prefix), np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=dtype).tobytes(), [len(document)])


def _write_and_interrupt(prefix: Path) -> None:
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        writer.add_documents(GOLDEN_BIN, [6])
        raise KeyboardInterrupt


def _golden(folder: Path, idx: bytes = GOLDEN_IDX, data: bytes = GOLDEN_BIN) -> str:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(data)
    return str(folder / "x")


def test_written_files_equal_the_golden_ones(tmp_path: Path) -> None:
    _write(tmp_path / "x", DOCUMENTS)

    assert (tmp_path / "x.idx").read_bytes() == GOLDEN_IDX
    assert (tmp_path / "x.bin").read_bytes() == GOLDEN_BIN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


# Documents of sequences; an empty document and empty sequences are among them.
SENTENCES = [[[5], [1, 2]], [], [[3]], [[], [4, 5, 6]], [[7], []], [[8, 9]]]
TYPES = ["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]


def _write_by_the_engine(prefix: Path, documents: list[list[list[int]]], dtype: str, modes: bool = False) -> None:
    """The files of Megatron's own builder; the mode of a sequence is its length modulo 3."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes)
    for document in documents:
        lengths = [len(tokens) for tokens in document]
        flat = torch.tensor([token for tokens in document for token in tokens])
        builder.add_document(flat, lengths, [length % 3 for length in lengths] if modes else None)
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chunk", [1, 4, 1 << 18])
def test_written_files_equal_those_of_the_engines_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, chunk: int
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", chunk)
    one_each = [[[number, 1, 2][: 1 + number % 3]] for number in range(20)]
    _write_by_the_engine(tmp_path / "theirs", one_each + SENTENCES, dtype)
    with IndexedDatasetWriter(str(tmp_path / "ours"), np.dtype(dtype)) as writer:
        for document in one_each + SENTENCES:
            flat, lengths = [token for each in document for token in each], [len(each) for each in document]
            # A writer that has seen only documents of one sequence each keeps no bounds; it must notice the others.
            add = writer.add_documents if len(lengths) == 1 else writer.add_document
            add(np.array(flat, dtype=dtype).tobytes(), lengths)
        assert writer.num_documents == 26

    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert check_dataset(str(tmp_path / "ours"), integers_only=False).num_documents == 26


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _write_and_interrupt(tmp_path / "x")

    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_writer_keeps_the_dataset_that_was_there(tmp_path: Path) -> None:
    _write(tmp_path / "x", DOCUMENTS)
    with pytest.raises(KeyboardInterrupt):
        _write_and_interrupt(tmp_path / "x")

    assert check_dataset(str(tmp_path / "x")).num_sequences == 3


def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _golden(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lightning_megatron.data.formats.index_files.open", refuse, raising=False)
    with pytest.raises(DataError, match=r"x\.idx cannot be read \(Permission denied\); make it readable"):
        check_dataset(prefix)


def test_a_writer_killed_between_its_two_files_leaves_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    _write(tmp_path / "x", DOCUMENTS)
    replaced: list[str] = []

    def replace_once(source: str, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(str(target))
        os.rename(source, target)

    monkeypatch.setattr("os.replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path / "x", [[1]])

    assert replaced == [str(tmp_path / "x.bin")]
    with pytest.raises(DataError, match=r"missing: .*x\.idx"):
        check_dataset(str(tmp_path / "x"))


def test_missing_files_and_suffixes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs two files, missing: .*x\.idx, .*x\.bin"):
        check_dataset(str(tmp_path / "x"))
    (tmp_path / "x.idx").write_bytes(GOLDEN_IDX)
    with pytest.raises(DataError, match=r"needs two files, missing: .*x\.bin; give the prefix"):
        check_dataset(str(tmp_path / "x"))
    prefix = _golden(tmp_path)
    with pytest.raises(DataError, match=r"it must be the prefix; write .*/x$"):
        check_dataset(prefix + ".bin")


def _patched(offset: int, data: bytes) -> bytes:
    return GOLDEN_IDX[:offset] + data + GOLDEN_IDX[offset + len(data) :]


@pytest.mark.parametrize(
    ("idx", "data", "message"),
    [
        (b"", GOLDEN_BIN, "ends within its first 9 bytes: truncated"),
        (GOLDEN_IDX[:20], GOLDEN_BIN, "has 20 bytes, its header alone needs 34"),
        (
            b"TNTIDX\0\0" + GOLDEN_IDX[8:],
            GOLDEN_BIN,
            r"old cached/lazy format \(TNTIDX\).*run: lightning-megatron conv",
        ),
        (b"PK\x03\x04" * 30, GOLDEN_BIN, "foreign file"),
        (_patched(9, struct.pack("<Q", 2)), GOLDEN_BIN, "says version 2"),
        (_patched(17, b"\x07"), GOLDEN_BIN, r"token type 7 \(floating-point tokens\)"),
        (_patched(17, b"\x63"), GOLDEN_BIN, r"token type 99 \(an unknown token type\)"),
        (GOLDEN_IDX[:-1], GOLDEN_BIN, "has 101 bytes, 3 sequences and 4 document bounds need 102"),
        (_patched(18, struct.pack("<Q", 2**63)), GOLDEN_BIN, "truncated or damaged"),
        (_patched(34, struct.pack("<i", -3)), GOLDEN_BIN, "a sequence of -3 tokens"),
        (GOLDEN_IDX, GOLDEN_BIN[:-2], "has 10 bytes, x.idx points outside it"),
        (_patched(46, struct.pack("<q", -2)), GOLDEN_BIN, r"points outside it \(position -2\)"),
        (_patched(46, struct.pack("<q", 2**63 - 1)), GOLDEN_BIN, "points outside it"),
        (_patched(54, struct.pack("<q", 4)), GOLDEN_BIN, "at position 4, the lengths before it add up to 6"),
        (GOLDEN_IDX, GOLDEN_BIN + b"\0\0", "the two files do not belong together"),
        (_patched(70, struct.pack("<q", 1)), GOLDEN_BIN, "do not ascend from 0"),
        (_patched(78, struct.pack("<qq", 2, 1)), GOLDEN_BIN, "do not ascend from 0"),
        (_patched(94, struct.pack("<q", 2)), GOLDEN_BIN, "ends its last document at sequence 2 of 3"),
        (GOLDEN_IDX[:18] + struct.pack("<QQq", 0, 1, 0), b"", "holds no sequence"),
        (GOLDEN_IDX[:18] + struct.pack("<QQiqqq", 1, 2, 0, 0, 0, 1), b"", "holds no token"),
    ],
)
def test_damage_is_named(tmp_path: Path, idx: bytes, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_dataset(_golden(tmp_path, idx, data))
