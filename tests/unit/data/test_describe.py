"""A description of a dataset says what plain counting says, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_megatron.data import describe
from lightning_megatron.data.describe import MOST_TOKENS_SHOWN, describe_dataset
from lightning_megatron.errors import DataError
from tests.unit.data.indexed_files import Documents, build, write_legacy

DOCUMENTS: Documents = [[[5, 6, 7], [1]], [], [[], [2, 3]], [list(range(300))]]


class _Letters:
    """A tokenizer of which token n is the n-th letter."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def __len__(self) -> int:
        return len(self._letters)

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._letters[token] for token in tokens)


def _build(prefix: Path, documents: Documents) -> str:
    return build(prefix, documents, "int32")


@pytest.mark.parametrize(("write", "name"), [(_build, "mmap"), (write_legacy, "cached/lazy")], ids=["mmap", "legacy"])
def test_a_description_says_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], name: str
) -> None:
    monkeypatch.setattr(describe, "CHUNK", 2)
    prefix = write(tmp_path / "x", DOCUMENTS)
    described = describe_dataset(prefix)

    bounds = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 127), (128, 255), (256, 511)]
    counts = [1, 1, 2, 0, 0, 0, 0, 0, 0, 1]
    assert (
        json.loads(json.dumps(described))
        == described
        == {
            "kind": "dataset",
            "prefix": prefix,
            "format": name,
            "documents": 4,
            "sequences": 5,
            "tokens": 306,
            "dtype": "int32",
            "bin_bytes": 4 * 306,
            "idx_bytes": (tmp_path / "x.idx").stat().st_size,
            "lengths": {"min": 0, "mean": 61.2, "max": 300},
            "histogram": [{"first": a, "last": b, "count": n} for (a, b), n in zip(bounds, counts, strict=True)],
            "sequences_per_document": {"min": 0, "mean": 1.25, "max": 2},
            "modes": None,
            "note": None,
        }
    )
    shown = describe_dataset(prefix, 9)["first_documents"]
    assert [each["tokens"] for each in shown] == [[5, 6, 7, 1], [], [2, 3], list(range(MOST_TOKENS_SHOWN))]
    assert [(each["number"], each["num_tokens"]) for each in shown] == [(0, 4), (1, 0), (2, 2), (3, 300)]
    shown = describe_dataset(prefix, 3, _Letters("abcdefgh"))["first_documents"]
    assert [each["text"] for each in shown] == ["fghb", "", "cd"]


def test_a_tokenizer_of_another_dataset_is_refused(tmp_path: Path) -> None:
    prefix = _build(tmp_path / "x", DOCUMENTS)
    with pytest.raises(DataError, match=r"x holds token 8, the tokenizer has 0 to 7; give its own"):
        describe_dataset(prefix, 4, _Letters("abcdefgh"))
