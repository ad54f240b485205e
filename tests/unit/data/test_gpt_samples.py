"""Sample i of a GPT is what Megatron's algorithm says, also where the engine miscounts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.gpt import GPTObjective, GPTSamples, build_gpt_index
from lightning_megatron.data.indexed import IndexedDatasetWriter
from lightning_megatron.data.samples import Part, SplitName
from lightning_megatron.errors import DataError
from tests.unit.data.corpus import engine_rows, opened


def _part(prefix: Path, num_samples: int | None = None, name: SplitName = "train", split: str = "8,1,1") -> Part:
    return Part(prefix=str(prefix), split=split, name=name, seed=1234, num_samples=num_samples)


def _write(prefix: Path, lengths: list[int]) -> None:
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(sum(lengths), dtype="<u2").tobytes(), lengths)


def _all_rows(samples: GPTSamples) -> np.ndarray:
    return samples.rows(range(len(samples)))["text"].numpy()


@settings(max_examples=60, deadline=None)
@given(
    # Empty documents, documents of a token, and documents of several samples.
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 7, 8, 9, 30]), min_size=1, max_size=30),
    seq_length=st.integers(1, 9),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    drop=st.booleans(),
)
def test_rows_equal_the_engines(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, num_samples: int | None, drop: bool
) -> None:
    # The engine stops if it keeps a partial sample and the last document of its order is empty.
    lengths = [*(length if drop else max(1, length) for length in lengths), seq_length + 1]
    prefix = tmp_path_factory.mktemp("rows") / "corpus"
    _write(prefix, lengths)
    options = {"drop_last_partial_validation_sequence": drop}
    part = _part(prefix, num_samples, name="valid", split="0,1,0")
    samples = opened(GPTObjective(seq_length=seq_length, **options), part)

    expected = engine_rows(
        ([str(prefix)], None), num_samples, split="0,1,0", name="valid", seq_length=seq_length, **options
    )
    assert np.array_equal(_all_rows(samples), expected)


@pytest.mark.parametrize(
    ("seq_length", "tokens"),
    [
        (1024, (1 << 25) + 3),  # the engine finds one sample too few, in single precision
        (3360, 230079 * 3360 + 1),  # one too many
        (3077, 952502 * 3077 + 1),  # likewise, and more tokens than 31 bits can count
    ],
)
def test_partial_sequences_are_counted_exactly_in_large_corpora(seq_length: int, tokens: int) -> None:
    lengths = np.array([tokens // 3, tokens // 3, tokens - 2 * (tokens // 3)], dtype=np.int32)

    index = build_gpt_index(lengths, np.arange(3, dtype=np.int32), seq_length, None, 1, True)

    full, rest = divmod(tokens - 1, seq_length)
    assert len(index.shuffle_index) == full + (rest > 0)
    begins = np.concatenate(([0], np.cumsum(lengths[index.document_index], dtype=np.int64)))
    places = begins[index.sample_index[:, 0]] + index.sample_index[:, 1]
    assert np.array_equal(places[:-1], np.arange(len(places) - 1) * seq_length)
    assert places[-1] == tokens - 1


@pytest.mark.parametrize("is_cut_while_read", [False, True])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_while_training_is_an_error_and_gives_no_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, is_cut_while_read: bool
) -> None:
    _write(tmp_path / "x", [20, 30])
    samples = opened(GPTObjective(seq_length=4), _part(tmp_path / "x", split="1"))
    before = _all_rows(samples)
    file = tmp_path / f"x{suffix}"
    size = file.stat().st_size

    (tmp_path / "copy").write_bytes(file.read_bytes()[:50])
    (tmp_path / "copy").rename(file)  # another file takes the name: the one that is in use is as it was
    assert (_all_rows(samples) == before).all()

    _write(tmp_path / "y", [20, 30])
    samples = opened(GPTObjective(seq_length=4), _part(tmp_path / "y", split="1"))
    assert (_all_rows(samples) == before).all()
    if is_cut_while_read:
        pieces = GPTSamples._pieces
        monkeypatch.setattr(GPTSamples, "_pieces", lambda *a: (pieces(*a), os.truncate(tmp_path / f"y{suffix}", 50))[0])
    else:
        os.truncate(tmp_path / f"y{suffix}", 50)
    with pytest.raises(DataError, match=rf"y\{suffix}: expected {size} bytes, got 50: .*resume from the last"):
        samples.rows([3])
