"""Does a description of a dataset say what plain counting says, and can its text and JSON be read?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.formats.any_format import check_any_dataset
from lightning_megatron.data.formats.description import (
    MOST_TOKENS_SHOWN,
    as_json,
    as_text,
    dataset_prefix,
    describe_dataset,
    first_documents,
)
from lightning_megatron.data.formats.mmap import IndexedDatasetWriter
from lightning_megatron.errors import DataError
from tests.unit.data.legacy_dataset import write_legacy

DOCUMENTS = [[[5, 6, 7], [1]], [], [[], [2, 3]], [list(range(300))]]


def _write(prefix: Path, documents: list[list[list[int]]]) -> str:
    with IndexedDatasetWriter(str(prefix), np.dtype("<i4")) as writer:
        for document in documents:
            flat = [token for tokens in document for token in tokens]
            writer.add_document(np.array(flat, dtype="<i4").tobytes(), [len(tokens) for tokens in document])
    return str(prefix)


class _Letters:
    """A tokenizer of which token n is the n-th letter."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def __len__(self) -> int:
        return len(self._letters)

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._letters[token] for token in tokens)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 18])
@pytest.mark.parametrize(("write", "name"), [(_write, "mmap"), (write_legacy, "cached/lazy")], ids=["mmap", "legacy"])
def test_a_description_says_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], name: str, chunk: int
) -> None:
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", chunk)
    described = as_json(describe_dataset(write(tmp_path / "x", DOCUMENTS)), [])

    expected: dict[str, object] = {
        "kind": "dataset",
        "prefix": str(tmp_path / "x"),
        "format": name,
        "documents": 4,
        "sequences": 5,
        "tokens": 306,
        "dtype": "int32",
        "bin_bytes": 4 * 306,
        "idx_bytes": (tmp_path / "x.idx").stat().st_size,
        "lengths": {"min": 0, "mean": 61.2, "max": 300},
        "sequences_per_document": {"min": 0, "mean": 1.25, "max": 2},
        "modes": None,
        "note": None,
    }
    bounds = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 127), (128, 255), (256, 511)]
    counts = [1, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    expected["histogram"] = [
        {"first": first, "last": last, "count": count} for (first, last), count in zip(bounds, counts, strict=True)
    ]
    assert described == expected
    assert json.loads(json.dumps(described)) == expected


def test_the_text_can_be_read(tmp_path: Path) -> None:
    documents = [[[1] * 20]] * 4 + [[[1] * 31]] * 8 + [[[1] * 32]]
    prefix = _write(tmp_path / "x", documents)
    lines = as_text(describe_dataset(prefix), first_documents(check_any_dataset(prefix, "path"), 1)).splitlines()

    assert lines == [
        prefix,
        "  format     mmap",
        "  documents  13",
        "  sequences  13, 1 a document",
        "  tokens     360",
        "  dtype      int32, 4 bytes a token",
        "  size       .bin 1,440 bytes (1.44 kB), .idx 302 bytes",
        "  lengths    min 20, mean 27.69, max 32",
        "",
        "Sequences by length in tokens",
        f"  {'16 - 31':>21}  {12:>13}   92.3%",
        f"  {'32 - 63':>21}  {1:>13}    7.7%",
        "",
        "Document 0, 20 tokens",
        f"  {' '.join('1' * 20)}",
    ]


def test_modes_and_remarks_are_told(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "x", DOCUMENTS)
    with open(prefix + ".idx", "ab") as stream:
        stream.write(bytes([1, 0, 0, 1, 0]))
    described = describe_dataset(prefix)

    assert as_json(described, [])["modes"] == {"0": 3, "1": 2}
    text = as_text(described, [])
    assert "\n  modes      3 of mode 0, 2 of mode 1\n" in text
    assert "\n  sequences  5, 1.2 a document (0 to 2)\n" in text


@pytest.mark.parametrize("write", [_write, write_legacy])
def test_first_documents_hold_their_first_tokens(tmp_path: Path, write: Callable[..., str]) -> None:
    header = check_any_dataset(write(tmp_path / "x", DOCUMENTS), "path")

    shown = first_documents(header, 9)
    assert [each.tokens for each in shown] == [[5, 6, 7, 1], [], [2, 3], list(range(MOST_TOKENS_SHOWN))]
    assert [(each.number, each.num_tokens) for each in shown] == [(0, 4), (1, 0), (2, 2), (3, 300)]
    assert [each.number for each in first_documents(header, 2)] == [0, 1]
    assert first_documents(header, 0) == []
    assert len(first_documents(header, 10**20)) == len(DOCUMENTS)
    texts = [each.text for each in first_documents(header, 3, _Letters("abcdefgh"))]
    assert texts == ["fghb", "", "cd"]


def test_a_tokenizer_of_another_dataset_is_refused(tmp_path: Path) -> None:
    header = check_any_dataset(_write(tmp_path / "x", DOCUMENTS), "path")
    with pytest.raises(
        DataError, match=r"x holds token 8, the tokenizer has 0 to 7: it was made with another; give that one"
    ):
        first_documents(header, 4, _Letters("abcdefgh"))
    with IndexedDatasetWriter(str(tmp_path / "f"), np.dtype("<f4")) as writer:
        writer.add_documents(np.array([1.5, 2], dtype="<f4").tobytes(), [2])
    floats = check_any_dataset(str(tmp_path / "f"), "path")
    assert first_documents(floats, 1)[0].tokens == [1.5, 2.0]
    with pytest.raises(DataError, match=r"holds token 1\.5, the tokenizer has 0 to 7: it was made with another"):
        first_documents(floats, 1, _Letters("abcdefgh"))


def test_text_is_cut_and_cannot_command_the_terminal(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "x", [[[0, 1, 2, 0]], [[0] * 500]])
    description = describe_dataset(prefix)
    tokenizer = _Letters("é\n\x1b" + "x" * 100)
    text = as_text(description, first_documents(description.header, 2, tokenizer))

    assert text.endswith(f"Document 0, 4 tokens\n  é\n  \\x1bé\n\nDocument 1, 500 tokens\n  {'é' * 256} …")
    single = _write(tmp_path / "single", [[[7]]])
    assert as_text(describe_dataset(single), first_documents(check_any_dataset(single, "path"), 1)).endswith(
        "Document 0, 1 token\n  7"
    )
    without = as_text(description, first_documents(description.header, 2))
    assert without.endswith(f"Document 1, 500 tokens\n  {' '.join('0' * 64)} …")


def test_a_dataset_is_recognised_by_prefix_and_files(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "x", DOCUMENTS)

    assert {dataset_prefix(prefix + suffix) for suffix in ("", ".bin", ".idx")} == {prefix}
    for path in (tmp_path, tmp_path / "y", tmp_path / "y.bin"):
        assert dataset_prefix(str(path)) is None
    (tmp_path / "x.bin").unlink()
    assert dataset_prefix(prefix) == prefix
    with pytest.raises(DataError, match=r"path=\S+x needs two files, missing: \S+x\.bin"):
        describe_dataset(prefix)
