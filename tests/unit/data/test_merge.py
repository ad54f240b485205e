"""Merged and converted datasets are what Megatron's own builder makes of them, and nothing else is ever written."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from lightning_megatron.data import merge
from lightning_megatron.data.merge import convert_dataset, merge_datasets
from lightning_megatron.errors import DataError
from tests.unit.data.indexed_files import INT32, Documents, build, read_by_the_engine, without_documents, write_legacy

# Empty documents and empty sequences are among them.
FIRST: Documents = [[[5], [1, 2]], [], [[3]]]
SECOND: Documents = [[], [[], [4, 5, 6]], [[7], []]]
THIRD: Documents = [[[8, 9, 10, 11]]]

# (code, element size, struct's letter of a token, elements of a token, the engine's name of the type)
KINDS = [
    (1, 1, "B", 1, "uint8"),
    INT32,
    (6, 4, "d", 2, "float64"),  # np.float until 2022: 8 bytes, counted in fours
    (6, 8, "d", 1, "float64"),
    (7, 8, "d", 1, "float64"),  # np.double until 2022
    (7, 4, "f", 1, "float32"),  # since 2023
    (8, 2, "H", 1, "uint16"),
]


def _assert_same_files(ours: Path, theirs: Path) -> None:
    for suffix in (".idx", ".bin"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", "uint16"])
@pytest.mark.parametrize("modes", [False, True])
def test_merged_files_equal_those_of_the_engines_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, modes: bool
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(merge, "PIECE_TOKENS", 2)
    inputs = [build(tmp_path / str(n), each, dtype, modes) for n, each in enumerate((FIRST, SECOND, THIRD))]
    inputs.append(inputs[0])  # once more
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type, multimodal=modes)
    # It collects garbage after each input, which takes half a second where torch is loaded.
    with patch("gc.collect"):
        for each in inputs:
            builder.add_index(each)
    builder.finalize(str(tmp_path / "theirs.idx"))

    result = merge_datasets(inputs, str(tmp_path / "ours"))

    _assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert (result.documents, result.sequences, result.tokens, result.notes) == (10, 11, 16, ())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-of-{kind[1]}")
def test_every_type_of_token_of_older_formats_is_converted_to_what_it_holds(
    tmp_path: Path, kind: tuple[int, int, str, int, str]
) -> None:
    prefix = write_legacy(tmp_path / "old", FIRST + SECOND, kind)
    before = _contents(tmp_path)

    result = convert_dataset(prefix, str(tmp_path / "new"))

    assert read_by_the_engine(result.prefix) == (FIRST + SECOND, kind[4])
    assert (result.documents, result.sequences, result.tokens) == (6, 7, 8)
    assert {**_contents(tmp_path), **before} == _contents(tmp_path)


@pytest.mark.parametrize(
    ("sequences", "documents"),
    [
        ([[5, 6], [7], [], [8], []], [[[5, 6], [7], []], [[8], []]]),
        ([[5, 6], [], [7], [8]], [[[5, 6], []], [[7], [8]]]),  # the last document is not ended
        ([[5, 6], [7]], [[[5, 6]], [[7]]]),  # nothing says where documents end
    ],
)
def test_documents_of_the_oldest_files_end_with_empty_sequences(
    tmp_path: Path, sequences: list[list[int]], documents: Documents
) -> None:
    result = convert_dataset(without_documents(write_legacy(tmp_path / "old", [sequences])), str(tmp_path / "new"))

    assert read_by_the_engine(result.prefix) == (documents, "int32")
    assert (result.documents, result.sequences) == (len(documents), len(sequences))
    found = "an empty sequence ends a document" if [] in sequences else "each sequence is taken for a document"
    assert found in result.notes[0]


def test_inputs_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    integers, floats = build(tmp_path / "a", FIRST), build(tmp_path / "f", FIRST, "float32")
    with_modes = build(tmp_path / "m", FIRST, modes=True)
    (tmp_path / "e.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    (tmp_path / "e.bin").write_bytes(b"")
    before = _contents(tmp_path)

    for inputs, message in (
        ([integers, floats], r"\S+/f holds float32 and \S+/a uint16; only integers mix"),
        ([integers, with_modes], r"\S+/a and \S+/m: only one of them has modes \(multimodal\)"),
        ([integers, str(tmp_path / "x")], r"input=\S+/x needs two files, missing"),
        ([integers, str(tmp_path / "e")], r"e\.idx accounts for 8 bytes, and \.bin has 0: damaged"),
    ):
        with pytest.raises(DataError, match=message):
            merge_datasets(inputs, str(tmp_path / "out"))
    assert _contents(tmp_path) == before


def test_inputs_and_what_exists_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = build(tmp_path / "a", FIRST), build(tmp_path / "b", SECOND)
    before = _contents(tmp_path)
    monkeypatch.chdir(tmp_path)

    for output, message in (
        (second, r"output_prefix=\S*b would overwrite \S+b\.idx, \S+b\.bin; choose another or remove"),
        ("c.bin", r"output_prefix=c\.bin must be the prefix of two files"),
        ("c/", r"output_prefix=c/ must be the prefix"),
    ):
        with pytest.raises(DataError, match=message):
            merge_datasets([first, second], output)
    with pytest.raises(DataError, match=r"is in the mmap format \(MMIDIDX\) already; use"):
        convert_dataset(first, "c")
    assert _contents(tmp_path) == before
