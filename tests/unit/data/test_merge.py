"""Is a merged dataset what Megatron's own builder makes of the same inputs, and is nothing else ever written?"""

from __future__ import annotations

import struct
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from lightning_megatron.data.formats.merge import merge_datasets
from lightning_megatron.errors import DataError
from tests.unit.data.legacy_dataset import write_legacy

Documents = list[list[list[int]]]

# Documents of sequences; empty documents and empty sequences are among them.
FIRST: Documents = [[[5], [1, 2]], [], [[3]]]
SECOND: Documents = [[], [[], [4, 5, 6]], [[7], []]]
THIRD: Documents = [[[8, 9, 10, 11]]]


def _build(prefix: Path, documents: Documents, dtype: str = "uint16", modes: bool = False) -> str:
    """A dataset by the engine's builder; the mode of a sequence is its length modulo 3."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes)
    for document in documents:
        lengths = [len(tokens) for tokens in document]
        flat = torch.tensor([token for tokens in document for token in tokens])
        builder.add_document(flat, lengths, [length % 3 for length in lengths] if modes else None)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def _merge_by_the_engine(prefix: Path, inputs: list[str], dtype: str, modes: bool = False) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type, multimodal=modes)
    # It collects garbage after each input, which takes half a second where torch is loaded.
    with patch("gc.collect"):
        for each in inputs:
            builder.add_index(each)
    builder.finalize(f"{prefix}.idx")


def _assert_same_files(ours: Path, theirs: Path) -> None:
    for suffix in (".idx", ".bin"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"])
@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
def test_merged_files_equal_those_of_the_engines_builder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, modes: bool, chunk: int
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", chunk)
    monkeypatch.setattr("lightning_megatron.data.formats.rewrite._PIECE_BYTES", 8 * chunk)
    inputs = [
        _build(tmp_path / name, documents, dtype, modes)
        for name, documents in (("a", FIRST), ("b", SECOND), ("c", THIRD))
    ]
    inputs.append(inputs[0])  # once more
    _merge_by_the_engine(tmp_path / "theirs", inputs, dtype, modes)

    result = merge_datasets(inputs, str(tmp_path / "ours"))

    _assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert (result.documents, result.sequences, result.tokens, result.notes) == (10, 11, 16, ())


@pytest.mark.parametrize(
    ("types", "merged"),
    [
        (("uint16", "int32"), "int32"),
        (("int32", "uint16"), "int32"),
        (("int64", "uint16"), "int64"),
        (("uint8", "uint16"), "uint16"),
        (("uint8", "int8"), "int16"),
        (("uint16", "int16"), "int32"),
    ],
)
def test_tokens_are_widened_to_the_smallest_type_that_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: tuple[str, str], merged: str
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.rewrite._PIECE_BYTES", 8)
    largest: Documents = [[[np.iinfo(types[0]).max, 1]]]
    inputs = [_build(tmp_path / "a", FIRST + largest, types[0]), _build(tmp_path / "b", SECOND, types[1])]
    _build(tmp_path / "theirs", FIRST + largest + SECOND, merged)

    result = merge_datasets(inputs, str(tmp_path / "ours"))

    _assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    expected = [
        f"{prefix} was widened from {each} to {merged}"
        for prefix, each in zip(inputs, types, strict=True)
        if each != merged
    ]
    assert list(result.notes) == expected


def test_older_formats_are_converted_on_the_way(tmp_path: Path) -> None:
    write_legacy(tmp_path / "b", SECOND)
    longs = struct.pack("<11q", *(0, 1, 2, 3), *(0, 1, 1, 2), *(1, 0, 1))
    oldest = b"TNTIDX\0\0" + struct.pack("<QQQQQ", 1, 4, 4, 3, 3) + longs
    (tmp_path / "c.idx").write_bytes(oldest)
    (tmp_path / "c.bin").write_bytes(struct.pack("<2i", 77, 78))
    inputs = [_build(tmp_path / "a", FIRST, "int32"), str(tmp_path / "b"), str(tmp_path / "c")]
    _build(tmp_path / "theirs", [*FIRST, *SECOND, [[77], []], [[78]]], "int32")

    result = merge_datasets(inputs, str(tmp_path / "ours"))

    _assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    (note,) = result.notes
    assert "c.idx names no documents (fairseq, or Megatron before November 2019)" in note


def test_inputs_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    integers, floats = _build(tmp_path / "a", FIRST), _build(tmp_path / "f", FIRST, "float32")
    doubles, with_modes = _build(tmp_path / "d", FIRST, "float64"), _build(tmp_path / "m", FIRST, modes=True)
    before = _names(tmp_path)

    for inputs, message in (
        ([integers, floats], r"\S+/f holds float32 and \S+/a uint16; only integers can be merged"),
        ([floats, doubles], r"\S+/d holds float64 and \S+/f float32; only integers"),
        ([integers, with_modes], r"\S+/m has modes \(multimodal\), \S+/a has none; merge datasets that all have them"),
        ([integers, str(tmp_path / "x")], r"input=\S+/x needs two files, missing"),
        ([integers, f"{integers}.bin"], r"input=\S+/a\.bin is a file, it must be the prefix; write \S+/a$"),
        ([], r"input=\[\] names no dataset"),
    ):
        with pytest.raises(DataError, match=message):
            merge_datasets(inputs, str(tmp_path / "out"))
    Path(f"{doubles}.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"d\.bin has 0 bytes, d\.idx points outside it"):
        merge_datasets([integers, doubles], str(tmp_path / "out"))
    assert _names(tmp_path) == before


def test_inputs_and_what_exists_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _build(tmp_path / "a", FIRST), _build(tmp_path / "b", SECOND)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)

    for output in (second, "b", "../" + tmp_path.name + "/b"):
        with pytest.raises(DataError, match=r"output_prefix=\S*b is the input \S+/b itself; choose another"):
            merge_datasets([first, second], output)
    with pytest.raises(
        DataError, match=r"output_prefix=b would overwrite b\.idx, b\.bin; choose another or remove them"
    ):
        merge_datasets([first], "b")
    with pytest.raises(DataError, match=r"output_prefix=c\.bin ends like a file"):
        merge_datasets([first], "c.bin")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("moment", ["index_parts", "_pieces"])
def test_an_interrupted_merge_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    prefix = _build(tmp_path / "a", FIRST)
    monkeypatch.setattr(f"lightning_megatron.data.formats.rewrite.{moment}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        merge_datasets([prefix], str(tmp_path / "out"))

    assert _names(tmp_path) == ["a.bin", "a.idx"]
