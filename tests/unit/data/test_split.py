"""Is a split what the engine makes of it, and is what the engine misreads refused?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.formats.mmap import IndexedDatasetWriter, IndexHeader, check_dataset
from lightning_megatron.data.samples.split import SPLIT_NAMES, canonical_split, parse_split, split_ranges, split_sizes
from lightning_megatron.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("949,50,1", (949, 50, 1)),
        ("969/30/1", (969, 30, 1)),
        (" 8 , 1.5, .5 ", (8, 1.5, 0.5)),
        ("90", (90, 0, 0)),
        ("1,0,0", (1, 0, 0)),
        ("0,1", (0, 1, 0)),
    ],
)
def test_weights_are_read(text: str, weights: tuple[float, float, float]) -> None:
    assert parse_split(text) == weights


@pytest.mark.parametrize("text", ["-1,1", "1e-3,1", "", "1,,1", "a", "1;2", "1,2,nan", "inf", "1,1,1,1", "+1"])
def test_what_is_not_a_weight_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one to three weights like 949,50,1"):
        parse_split(text)


@pytest.mark.parametrize("text", ["0", "0,0,0", "0.0,.0"])
def test_a_split_without_documents_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="gives no documents to any split"):
        parse_split(text)


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1000)), min_size=1, max_size=3).filter(any),
    num_sequences=st.integers(1, 10**9),
)
def test_bounds_equal_the_engines(weights: list[float], num_sequences: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    text = ",".join(np.format_float_positional(weight) for weight in weights)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(canonical_split(text)))

    for name, bounds in zip(SPLIT_NAMES, matrix, strict=True):
        ours = split_ranges(text, num_sequences)[name]
        if bounds is None:
            assert len(ours) == 0
        else:
            assert ours == range(*(int(round(bound * float(num_sequences))) for bound in bounds))


def _dataset(folder: Path, lengths: list[int]) -> IndexHeader:
    with IndexedDatasetWriter(str(folder / "x"), np.dtype("<u2")) as writer:
        writer.add_documents(bytes(2 * sum(lengths)), lengths)
    return check_dataset(str(folder / "x"))


def test_sizes_count_documents_tokens_and_samples(tmp_path: Path) -> None:
    header = _dataset(tmp_path, [10, 20, 30, 41, 9])

    sizes = split_sizes(header, "3,2", seq_length=8)

    assert list(sizes) == ["train", "valid"]
    assert (sizes["train"].documents, sizes["train"].tokens) == (3, 60)
    assert (sizes["valid"].documents, sizes["valid"].tokens) == (2, 50)
    # 60 tokens predict 59: seven samples of eight, and a tail of three.
    assert sizes["train"].num_samples(8) == 7
    assert sizes["valid"].num_samples(49) == 1
    assert sizes["valid"].num_samples(50) == 0


def test_one_token_too_few_for_a_sample_is_refused_with_counts(tmp_path: Path) -> None:
    header = _dataset(tmp_path, [100, 8])

    split_sizes(header, "1,1", seq_length=7)
    with pytest.raises(DataError, match=r"valid 1 of 2 documents with 8 tokens, one sample of seq_length=8 needs 9;"):
        split_sizes(header, "1,1", seq_length=8)


def test_a_weight_too_small_for_one_document_is_refused(tmp_path: Path) -> None:
    header = _dataset(tmp_path, [100] * 40)

    with pytest.raises(DataError, match="gives test 0 of 40 documents with 0 tokens"):
        split_sizes(header, "949,50,1", seq_length=8)
