"""Indexed datasets: files equal Megatron's byte for byte, appear complete or not at all, and damage is detected."""

import functools
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from lightning_megatron.data import indexed, indexed_report, indexed_writer
from lightning_megatron.data.indexed import MAGIC, OLD_MAGIC, IndexedDataset, check_dataset
from lightning_megatron.data.indexed_report import MAX_TOKENS_SHOWN, describe_dataset
from lightning_megatron.data.indexed_writer import convert_dataset, dataset_writers, merge_datasets
from lightning_megatron.errors import DataError
from tests.marks import exhaustive
from tests.unit.data.corpus import INT32, Documents, build, longs, read_documents, write_legacy

check_any = functools.partial(check_dataset, for_training=False)

# Documents of sequences, some of them empty.
FIRST: Documents = [
    [[5], [1, 2]],
    [],
    [[3]],
]
SECOND: Documents = [
    [],
    [[], [4, 5, 6]],
    [[7], []],
]
THIRD: Documents = [[[8, 9, 10, 11]]]

# Three sequences in three documents, assembled by hand from the format descriptions.
NEW_IDX = (
    MAGIC
    + struct.pack(
        "<QBQQ3i",
        1,
        8,
        3,
        4,
        3,
        1,
        2,
    )
    + longs(0, 6, 8)
    + longs(0, 1, 2, 3)
)
NEW_BIN = struct.pack("<6H", 5, 6, 7, 65535, 1, 2)
OLD_IDX = (
    OLD_MAGIC
    + longs(1, 4, 4, 3, 3, 4)
    + longs(0, 1, 2, 3)
    + longs(0, 3, 4, 6)
    + longs(3, 1, 2, 0, 1, 2, 3)
)
OLD_BIN = struct.pack("<6i", 5, 6, 7, 65535, 1, 2)
OLDEST_IDX = OLD_IDX[:48] + longs(0, 1, 2, 3) + longs(0, 3, 3, 6) + longs(3, 0, 3)
SOUND: dict[str, tuple[bytes, bytes, Callable[[str], IndexedDataset]]] = {
    "mmap": (NEW_IDX, NEW_BIN, check_dataset),
    "old": (OLD_IDX, OLD_BIN, check_any),
    "oldest": (OLDEST_IDX, OLD_BIN, check_any),
}


def _files(
    folder: Path,
    idx: bytes = NEW_IDX,
    data: bytes = NEW_BIN,
) -> str:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(data)
    return str(folder / "x")


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- writing and reading --------------------------------------------------------------------------------------------


def _write_zeros(prefix: Path) -> None:
    """Write two datasets with 200,000 bytes of .bin, and 20 bytes per sequence in .idx."""
    with dataset_writers(
        prefix,
        np.dtype("<u2"),
        ["_a", "_b"],
    ) as writers:
        for _ in range(10_000):
            for writer in writers:
                writer.add_documents(bytes(20), [10])


# The disk is full in the middle of .bin, at its end, in .idx.
@pytest.mark.parametrize("room", [0, 150_000, 200_010])
def test_full_disk_leaves_no_files(tmp_path: Path, room: int) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard_limit))
    try:
        with pytest.raises(
            DataError, match=r"cannot be written \(.*File too large\); choose a writable"
        ):
            _write_zeros(tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    assert not list(tmp_path.iterdir())


def _changed(
    idx: bytes,
    offset: int,
    letters: str,
    *values: int,
) -> bytes:
    data = struct.pack(f"<{letters}", *values)
    return idx[:offset] + data + idx[offset + len(data) :]


@pytest.mark.parametrize(
    ("idx", "bounds", "message"),
    [
        (OLDEST_IDX, [0, 2, 3], "an empty sequence ends a document"),
        (OLD_IDX[:48] + OLD_IDX[56:-32], [0, 1, 2, 3], "each sequence is taken for a document"),
    ],
)
def test_index_without_documents_is_read_as_by_megatron(
    tmp_path: Path, idx: bytes, bounds: list[int], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        dataset = check_any(_files(tmp_path, idx, OLD_BIN))
    assert dataset.document_bounds.tolist() == bounds


EMPTY_IDX = NEW_IDX[:18] + struct.pack(
    "<QQiqqq",
    1,
    2,
    0,
    0,
    0,
    1,
)
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda d: check_dataset(_files(d, NEW_IDX[:20])),
        "begins with .* and has 20 bytes: damaged, .*; run preprocess",
    ),
    (
        lambda d: check_dataset(
            _files(
                d,
                _changed(
                    NEW_IDX,
                    17,
                    "B",
                    9,
                ),
            )
        ),
        "type 9, expected one of 1, 2, 3, 4, 5, 6, 7",
    ),
    (
        lambda d: check_dataset(
            _files(
                d,
                _changed(
                    NEW_IDX,
                    54,
                    "q",
                    4,
                ),
            )
        ),
        "not begin where the previous one ends",
    ),
    (
        lambda d: check_dataset(
            _files(
                d,
                _changed(
                    NEW_IDX,
                    42,
                    "i",
                    1,
                ),
            )
        ),
        r"x\.idx accounts for 10 bytes, and \.bin has",
    ),
    (
        lambda d: check_any(
            _files(
                d,
                _changed(OLD_IDX, 24, "q", 8),
                OLD_BIN,
            )
        ),
        "token type 4 of 8 bytes, expected 1 of",
    ),
    (
        lambda d: check_dataset(_files(d, EMPTY_IDX, b"")),
        r"x\.bin cannot be read \(cannot mmap an empty file\)",
    ),
    (lambda d: check_dataset(str(d / "x.bin")), r"expected a prefix, got a file; write \S+/x$"),
    (
        lambda d: check_dataset(build(d / "f", FIRST, "float32")),
        "f holds float32: expected integers, on which a model",
    ),
    (
        lambda d: merge_datasets([build(d / "a", FIRST), build(d / "f", FIRST, "float32")], "x"),
        r"\S+/f holds float32 and \S+/a uint16; only integer types can be merged",
    ),
    (
        lambda d: merge_datasets([build(d / "a", FIRST)] * 2, str(d / "a")),
        r"overwrite \S+a\.idx, \S+a\.bin; choose",
    ),
    (
        lambda d: merge_datasets([build(d / "a", FIRST)], "c/"),
        r"output_prefix=c/: expected the prefix",
    ),
    (
        lambda d: convert_dataset(build(d / "a", FIRST), "c"),
        r"is in the mmap format \(MMIDIDX\) already; use",
    ),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED)
def test_unreadable_or_unwritable_dataset_is_refused(
    tmp_path: Path, attempt: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        attempt(tmp_path)


def _is_refused(read: Callable[[str], object], prefix: str) -> bool:
    """Whether ``read`` raises an error that names the dataset."""
    try:
        read(prefix)
    except DataError as error:
        return prefix in str(error)
    return False


@pytest.mark.filterwarnings("ignore:.*has no document index")
@pytest.mark.parametrize(
    "name",
    ["mmap", "old", exhaustive("oldest")],
)
def test_truncated_files_and_flipped_bits_are_detected(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "CHUNK", 2)  # puts some damage at chunk boundaries
    idx, data, check = SOUND[name]
    prefix = _files(tmp_path, idx, data)
    assert len(check(prefix).lengths) == 3
    for size in range(len(idx)):
        assert _is_refused(check, _files(tmp_path, idx[:size], data))
    for size in range(len(data)):
        assert _is_refused(check, _files(tmp_path, idx, data[:size]))
    (tmp_path / "x.bin").write_bytes(data)
    accepted = 0
    for bit in range(8 * len(idx)):
        damaged = bytearray(idx)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.idx").write_bytes(damaged)
        accepted += not _is_refused(check, prefix)
    # Undetectable: another dtype of the same size, other ordered bounds.
    assert accepted <= 2


# ---- merging and converting -----------------------------------------------------------------------------------------

# (type code, element size, struct letter of a token, elements per token, dtype name in Megatron-Core)
KINDS = [
    (1, 1, "B", 1, "uint8"),
    INT32,
    (6, 4, "d", 2, "float64"),  # np.float until 2022: 8 bytes, counted in fours
    (6, 8, "d", 1, "float64"),
    (7, 8, "d", 1, "float64"),  # np.double until 2022
    (7, 4, "f", 1, "float32"),  # since 2023
    (8, 2, "H", 1, "uint16"),
]


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_merged_files_equal_megatrons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(indexed_writer, "PIECE_TOKENS", 2)
    first = build(tmp_path / "0", FIRST, dtype)
    second = build(tmp_path / "1", SECOND, dtype)
    third = build(tmp_path / "2", THIRD, dtype)
    inputs = [first, second, third, first]
    builder = IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"),
        dtype=np.dtype(dtype).type,
    )
    # The builder collects garbage after each input: half a second with torch loaded.
    with patch("gc.collect"):
        for each in inputs:
            builder.add_index(each)
    builder.finalize(str(tmp_path / "theirs.idx"))

    merge_datasets(inputs, str(tmp_path / "ours"))

    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-of-{kind[1]}")
def test_every_token_type_of_older_formats_is_converted(
    tmp_path: Path, kind: tuple[int, int, str, int, str]
) -> None:
    prefix = write_legacy(tmp_path / "old", FIRST + SECOND, kind)
    before = _contents(tmp_path)

    new = convert_dataset(prefix, str(tmp_path / "new"))

    assert read_documents(new.prefix) == (FIRST + SECOND, kind[4])
    assert {**_contents(tmp_path), **before} == _contents(tmp_path)


# ---- description ----------------------------------------------------------------------------------------------------


class _Letters(str):
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(self[token] for token in tokens)


def test_description_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_report, "CHUNK", 2)
    prefix = build(
        tmp_path / "x",
        [
            [[5, 6, 7], [1]],
            [],
            [[], [2, 3]],
            [list(range(300))],
        ],
    )
    description = describe_dataset(prefix)

    bounds = [(0, 0), *((2**bits, 2 ** (bits + 1) - 1) for bits in range(9))]
    counts = [
        1,
        1,
        2,
        0,
        0,
        0,
        0,
        0,
        0,
        1,
    ]
    assert description == {
        "kind": "dataset",
        "prefix": prefix,
        "format": "mmap",
        "dtype": "uint16",
        "documents": 4,
        "sequences": 5,
        "tokens": 306,
        "bin_bytes": 2 * 306,
        "idx_bytes": (tmp_path / "x.idx").stat().st_size,
        "lengths": {"min": 0, "mean": 61.2, "max": 300},
        "histogram": [
            {"first": a, "last": b, "count": n} for (a, b), n in zip(bounds, counts, strict=True)
        ],
        "sequences_per_document": {"min": 0, "mean": 1.25, "max": 2},
    }
    assert json.loads(json.dumps(description)) == description
    documents = describe_dataset(prefix, 9)["first_documents"]
    assert [each["tokens"] for each in documents] == [
        [5, 6, 7, 1],
        [],
        [2, 3],
        list(range(MAX_TOKENS_SHOWN)),
    ]
    assert [(each["number"], each["num_tokens"]) for each in documents] == [
        (0, 4),
        (1, 0),
        (2, 2),
        (3, 300),
    ]
    documents = describe_dataset(prefix, 3, _Letters("abcdefgh"))["first_documents"]
    assert [each["text"] for each in documents] == ["fghb", "", "cd"]
    with pytest.raises(
        DataError, match=r"x holds token 8, the tokenizer has 0 to 7; give the one that made"
    ):
        describe_dataset(prefix, 4, _Letters("abcdefgh"))
