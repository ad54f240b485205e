"""Are sequences found wherever they lie in the file, and none outside of it?"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.formats.mapped import MappedDataset
from lightning_megatron.errors import DataError
from tests.unit.data.sentence_corpus import write_sentences

SENTENCES = [[1, 2, 3], [4], [], [5, 6]]


def _move(prefix: Path, sequence: int, position: int) -> None:
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(34 + 4 * len(SENTENCES) + 8 * sequence)
        stream.write(struct.pack("<q", position))


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_consecutive_sequences_are_read_at_once(tmp_path: Path, dtype: str) -> None:
    write_sentences(tmp_path / "corpus", [SENTENCES[:1], SENTENCES[1:]], dtype)
    dataset = MappedDataset(str(tmp_path / "corpus"))

    for opened in (dataset, pickle.loads(pickle.dumps(dataset))):
        for begin in range(4):
            for end in range(begin + 1, 5):
                tokens, lengths = opened.sequences(begin, end)
                assert tokens.tolist() == sum(SENTENCES[begin:end], [])
                assert lengths.tolist() == [len(sentence) for sentence in SENTENCES[begin:end]]
                assert tokens.dtype == np.dtype(dtype)
    assert dataset.document_bounds.tolist() == [0, 1, 4]


def test_sequences_may_lie_in_any_order(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", [SENTENCES])
    _move(tmp_path / "corpus", 3, 0)

    assert MappedDataset(str(tmp_path / "corpus")).sequences(0, 4)[0].tolist() == [1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize("position", [-2, 1, 10, 1 << 62])
def test_positions_outside_or_between_tokens_are_refused(tmp_path: Path, position: int) -> None:
    write_sentences(tmp_path / "corpus", [SENTENCES])
    _move(tmp_path / "corpus", 3, position)

    with pytest.raises(DataError, match=r"corpus\.idx points outside of \.bin or between tokens; run preprocess again"):
        MappedDataset(str(tmp_path / "corpus")).sequences(2, 4)


def test_a_dataset_of_empty_sequences_has_no_tokens(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", [[[], []]])

    assert MappedDataset(str(tmp_path / "corpus")).sequences(0, 2)[0].tolist() == []
