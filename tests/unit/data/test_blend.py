"""Blends and splits are read as they are meant, taken as Megatron takes them, and never short of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_megatron.data.blend import (
    Source,
    SplitRequest,
    check_request,
    mix,
    num_samples_of_one_pass,
    open_samples,
    parse_blend,
)
from lightning_megatron.data.gpt import GPTObjective
from lightning_megatron.data.indexed import IndexedDatasetWriter
from lightning_megatron.data.samples import SPLIT_NAMES, Samples, SplitName, canonical_split, parse_split, split_ranges
from lightning_megatron.errors import ConfigError, DataError
from tests.unit.data.corpus import write_corpus
from tests.unit.data.engine_samples import engine_dataset, engine_rows

SEQ_LENGTH = 16


@pytest.mark.parametrize(
    ("data_path", "sources"),
    [
        ("books", [("books", None)]),
        (["books", "web"], [("books", None), ("web", None)]),
        ([0.7, "books", 0.3, "web"], [("books", 0.7), ("web", 0.3)]),
        (["70", "books", "3e1", "web"], [("books", 70), ("web", 30)]),
        ([1, "books", 0, "web", 2, "code"], [("books", 1), ("code", 2)]),
    ],
)
def test_paths_and_weights_are_read(
    data_path: str | Sequence[str | float], sources: list[tuple[str, float | None]]
) -> None:
    assert parse_blend(data_path) == tuple(Source(prefix, weight) for prefix, weight in sources)


@pytest.mark.parametrize(
    ("data_path", "message"),
    [
        ([], "must be prefixes"),
        (["a", " "], "must be prefixes"),
        ("30", r"data_path=\['30'\] must be prefixes \(./30 for 30\)"),
        (["books", 0.5, "web", 0.5], "must be prefixes"),
        ([0.5, "books", 0.5], "must be prefixes"),
        ([float("inf"), "books", 2, "web"], "finite weights"),
        ([0, "books", "0.0", "web"], "gives 0 datasets a weight"),
        (["books", "web", "./books"], r"has \S+/books 2 times; give it once"),
    ],
)
def test_what_can_be_read_in_two_ways_or_none_is_refused(data_path: str | Sequence[str | float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(data_path)


def _request(
    data_path: Sequence[str | float], num_samples: int | None, name: SplitName = "train", split: str = "8,1,1"
) -> SplitRequest:
    return SplitRequest(
        name=name,
        sources=parse_blend(data_path),
        split=split,
        objective=GPTObjective(seq_length=SEQ_LENGTH),
        seed=1234,
        num_samples=num_samples,
    )


def _rows(samples: Samples, indices: Sequence[int] | None = None) -> NDArray[np.int64]:
    return samples.rows(range(len(samples)) if indices is None else indices)["text"].numpy()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    for seed, num_documents in enumerate((50, 25, 120)):
        write_corpus(folder / str(seed), num_documents, seed=seed)
    return [str(folder / str(seed)) for seed in range(3)]


@pytest.mark.parametrize("num_samples", [1, 77, 1000])
@pytest.mark.parametrize("weights", [(0.3, 0.3, 0.4), (5, 1, 0.001), None], ids=str)
def test_a_blend_equals_the_engines(
    corpora: list[str], tmp_path: Path, weights: tuple[float, ...] | None, num_samples: int
) -> None:
    wanted = num_samples if weights else min(num_samples, 20) if num_samples < 1000 else None
    theirs = engine_dataset((corpora, weights and list(weights)), split="8,1,1", name="train", num_samples=wanted)
    pairs = [item for pair in zip(weights, corpora, strict=True) for item in pair] if weights else corpora

    samples = open_samples(_request(pairs, wanted), str(tmp_path))

    assert len(samples) >= (wanted or 1)
    assert np.array_equal(_rows(samples), engine_rows(theirs))


@settings(max_examples=100, deadline=None)
@given(
    datasets=st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 1e3)), min_size=2, max_size=8),
    num_samples=st.one_of(st.none(), st.integers(1, 500)),
)
def test_no_blend_takes_more_of_a_dataset_than_there_is(
    datasets: list[tuple[int, float]], num_samples: int | None
) -> None:
    counts = [count for count, _ in datasets]
    sources = tuple(Source(str(number), weight) for number, (_, weight) in enumerate(datasets))

    mixture = mix(sources, counts, num_samples)

    taken = np.bincount(mixture.dataset_index, minlength=len(sources))
    if num_samples is None:
        assert not mixture.part_samples.any()
        assert len(mixture.dataset_index) == num_samples_of_one_pass(sources, counts)
        # One more sample for everyone's share would be one too many for one of them.
        shares = np.array([weight for _, weight in datasets]) / sum(weight for _, weight in datasets)
        assert (shares * (len(mixture.dataset_index) + 1) > np.array(counts) - 1e-6).any()
    else:
        assert len(mixture.dataset_index) >= num_samples
    assert (taken <= np.where(mixture.part_samples > 0, mixture.part_samples, counts)).all()
    for number, count in enumerate(taken):
        assert np.array_equal(mixture.sample_index[mixture.dataset_index == number], np.arange(count))


def test_a_dataset_without_a_sample_or_with_damage_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "large", 50)
    with IndexedDatasetWriter(str(tmp_path / "small"), np.dtype("<u2")) as writer:
        writer.add_documents(bytes(2 * SEQ_LENGTH), [SEQ_LENGTH])
    data_path = [1, str(tmp_path / "large"), 2, str(tmp_path / "small")]

    with pytest.raises(DataError, match=r"gives train 1 of 1 documents of .*small with 16 tokens, .* needs 17; lower"):
        check_request(_request(data_path, None, split="1"), is_used=True)
    assert not (tmp_path / "large").exists()
    (tmp_path / "large.bin").write_bytes((tmp_path / "large.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"large.idx accounts for \d+ bytes, and .bin has"):
        check_request(_request(data_path, None, split="1"), is_used=True)


# ---- splits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["-1,1", "1e-3,1", "", "1,2,nan", "1,1,1,1"])
def test_what_is_not_a_weight_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one to three weights like 949,50,1"):
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
