"""Are Megatron's older datasets read as what they hold, and converted unchanged?"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.formats.convert import convert_dataset
from lightning_megatron.data.formats.legacy import check_legacy_dataset
from lightning_megatron.data.formats.mmap import check_dataset
from lightning_megatron.errors import DataError
from tests.unit.data.legacy_dataset import INT32, longs, write_legacy

# Documents of sequences, as sentences make them; an empty document and an empty sequence are among them.
DOCUMENTS = [[[5, 6, 7], [1]], [[127]], [], [[], [2, 3]]]

# (code, element size, struct's letter of a token, elements of a token, the engine's name of the type)
KINDS = [
    (1, 1, "B", 1, "uint8"),
    (2, 1, "b", 1, "int8"),
    (3, 2, "h", 1, "int16"),
    INT32,
    (5, 8, "q", 1, "int64"),
    (6, 4, "d", 2, "float64"),  # np.float until 2022: 8 bytes, counted in fours
    (6, 8, "d", 1, "float64"),
    (7, 8, "d", 1, "float64"),  # np.double until 2022
    (7, 4, "f", 1, "float32"),  # since 2023
    (8, 2, "H", 1, "uint16"),
]


def _without_documents(prefix: str) -> str:
    """Make the index what fairseq, and Megatron before November 2019, wrote: no D, no document bounds."""
    path = Path(f"{prefix}.idx")
    index = path.read_bytes()
    (num_bounds,) = struct.unpack("<Q", index[48:56])
    path.write_bytes(index[:48] + index[56 : len(index) - 8 * num_bounds])
    return prefix


def _read_by_the_engine(prefix: str) -> tuple[list[list[list[Any]]], str]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    documents = [[dataset[i].tolist() for i in range(*pair)] for pair in zip(bounds, bounds[1:], strict=False)]
    return documents, dataset[0].dtype.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-of-{kind[1]}")
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_every_type_of_token_is_read_and_converted_to_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[int, int, str, int, str], chunk: int
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", chunk)
    prefix = write_legacy(tmp_path / "old", DOCUMENTS, kind)
    before = [(tmp_path / f"old{suffix}").read_bytes() for suffix in (".idx", ".bin")]

    result = convert_dataset(prefix, str(tmp_path / "new"))

    assert _read_by_the_engine(result.prefix) == (DOCUMENTS, kind[4])
    assert (result.documents, result.sequences, result.tokens) == (4, 5, 7)
    assert [(tmp_path / f"old{suffix}").read_bytes() for suffix in (".idx", ".bin")] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.bin", "new.idx", "old.bin", "old.idx"]
    if "float" not in kind[4]:  # our training reads integers only
        assert check_dataset(result.prefix).num_documents == 4


def _create_doc_idx(sizes: list[int]) -> list[int]:
    """Where documents begin, by the rule that Megatron had for such files."""
    return [0] + [number + 1 for number, size in enumerate(sizes) if size == 0]


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
@pytest.mark.parametrize(
    ("sequences", "documents"),
    [
        ([[5, 6], [7], [], [8], []], [[[5, 6], [7], []], [[8], []]]),
        ([[5, 6], [], [7], [8]], [[[5, 6], []], [[7], [8]]]),  # the last document is not ended
        ([[], [], [9]], [[[]], [[]], [[9]]]),
        ([[5, 6], [7]], [[[5, 6]], [[7]]]),  # nothing says where documents end
    ],
)
def test_documents_of_the_oldest_files_end_with_empty_sequences(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sequences: list[list[int]],
    documents: list[list[list[int]]],
    chunk: int,
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", chunk)
    prefix = _without_documents(write_legacy(tmp_path / "old", [sequences]))

    result = convert_dataset(prefix, str(tmp_path / "new"))

    assert _read_by_the_engine(result.prefix) == (documents, "int32")
    assert (result.documents, result.sequences) == (len(documents), len(sequences))
    (note,) = result.notes
    empty = [] in sequences
    assert ("an empty sequence ends a document" if empty else "each sequence is taken for a document") in note
    if empty:
        begins = [0, *np.cumsum([len(document) for document in documents]).tolist()]
        theirs = _create_doc_idx([len(tokens) for tokens in sequences])
        assert begins == [*theirs, *([] if sequences[-1] == [] else [len(sequences)])]


GOLDEN_IDX = (
    b"TNTIDX\0\0"
    + struct.pack("<QQQQQQ", 1, 4, 4, 3, 3, 4)
    + longs([0, 1, 2, 3] + [0, 3, 4, 6] + [3, 1, 2] + [0, 1, 2, 3])
)
GOLDEN_BIN = struct.pack("<6i", 5, 6, 7, 65535, 1, 2)


def _golden(folder: Path, idx: bytes = GOLDEN_IDX, data: bytes = GOLDEN_BIN) -> str:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(data)
    return str(folder / "x")


def _patched(offset: int, *numbers: int) -> bytes:
    data = struct.pack(f"<{len(numbers)}q", *numbers)
    return GOLDEN_IDX[:offset] + data + GOLDEN_IDX[offset + len(data) :]


@pytest.mark.parametrize(
    ("idx", "data", "message"),
    [
        (b"", GOLDEN_BIN, "ends within its first 8 bytes: truncated"),
        (GOLDEN_IDX[:50], GOLDEN_BIN, "has 50 bytes, its header alone needs 56"),
        (b"MMIDIDX\0\0" + GOLDEN_IDX[9:], GOLDEN_BIN, r"is in the mmap format \(MMIDIDX\) already; use"),
        (b"PK\x03\x04" * 30, GOLDEN_BIN, "foreign file; give the prefix"),
        (_patched(8, 2), GOLDEN_BIN, "says version 2, the only version is 1"),
        (_patched(16, 99), GOLDEN_BIN, r"token type 99 of 4 bytes, there are 1 of 1, .*6 of 4, 6 of 8"),
        (_patched(24, 8), GOLDEN_BIN, "token type 4 of 8 bytes"),
        (GOLDEN_IDX[:-1], GOLDEN_BIN, "has 175 bytes, 3 sequences, 3 axes and 4 document bounds need 176"),
        (_patched(32, 2**62), GOLDEN_BIN, "truncated or damaged"),
        (_patched(40, 2**62), GOLDEN_BIN, "truncated or damaged"),
        (_patched(40, 4, 3), GOLDEN_BIN, "has 4 axes for 3 sequences"),
        (
            GOLDEN_IDX[:40] + struct.pack("<Q", 4) + GOLDEN_IDX[56:-32] + longs([1]),
            GOLDEN_BIN,
            "4 axes for 3 sequences",
        ),
        (GOLDEN_IDX[:32] + struct.pack("<QQQ", 0, 0, 1) + longs([0, 0, 0]), b"", "holds no sequence"),
        (_patched(64, 2), GOLDEN_BIN, "sequences of other than one axis"),
        (_patched(88, 1), GOLDEN_BIN, "does not begin with the first token"),
        (_patched(96, -1), GOLDEN_BIN, "a sequence that ends at element -1, .bin has 6 elements"),
        (_patched(96, 2**63 - 1), GOLDEN_BIN, "a sequence that ends at element 9223372036854775807"),
        (_patched(96, 4), GOLDEN_BIN, "a sequence of 3 tokens of 4 bytes in 4 elements of 4"),
        (_patched(96, 5), GOLDEN_BIN, "a sequence of 3 tokens of 4 bytes in 5 elements"),
        (_patched(120, -3), GOLDEN_BIN, "a sequence of -3 tokens"),
        (_patched(120, 2**62), GOLDEN_BIN, "a sequence of 4611686018427387904 tokens"),
        (GOLDEN_IDX, GOLDEN_BIN[:-4], "ends at element 6, .bin has 5 elements"),
        (GOLDEN_IDX, GOLDEN_BIN + b"\0", "has 25 bytes, x.idx accounts for 24"),
        (_patched(144, 1), GOLDEN_BIN, "document bounds that do not ascend from 0"),
        (_patched(152, 3), GOLDEN_BIN, "document bounds that do not ascend from 0"),
        (_patched(168, 2), GOLDEN_BIN, r"ends its last document at sequence 2 of 3: .*if Megatron merged"),
    ],
)
def test_damage_is_named(tmp_path: Path, idx: bytes, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        check_legacy_dataset(_golden(tmp_path, idx, data))
    assert str(tmp_path / "x") in str(refused.value)
    assert "; " in str(refused.value)


def test_missing_files_and_suffixes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input=\S+/x needs two files, missing: \S+x\.idx, \S+x\.bin"):
        check_legacy_dataset(str(tmp_path / "x"))
    prefix = _golden(tmp_path)
    with pytest.raises(DataError, match=r"it must be the prefix; write \S+/x$"):
        check_legacy_dataset(prefix + ".idx")
