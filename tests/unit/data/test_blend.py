"""Blends and splits are read as they are meant, taken as Megatron takes them, and never short of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.gpt import GPTObjective
from lightning_megatron.data.samples import (
    SPLIT_NAMES,
    Part,
    canonical_split,
    check_parts,
    mix,
    open_samples,
    parse_blend,
    parse_split,
    split_ranges,
)
from lightning_megatron.errors import ConfigError, DataError
from tests.unit.data.corpus import engine_rows, write_corpus

GPT = GPTObjective(seq_length=16)


@pytest.mark.parametrize(
    ("data_path", "blend"),
    [
        ("books", [("books", None)]),
        (["books", "web"], [("books", None), ("web", None)]),
        ([0.7, "books", 0.3, "web"], [("books", 0.7), ("web", 0.3)]),
        (["70", "books", 0, "web", "3e1", "code"], [("books", 70), ("code", 30)]),
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
def test_paths_and_weights_are_read_and_what_can_be_read_in_two_ways_or_none_is_refused(
    data_path: Any, blend: Any
) -> None:
    if isinstance(blend, list):
        assert parse_blend(data_path) == blend
    else:
        with pytest.raises(ConfigError, match=blend):
            parse_blend(data_path)


def _parts(data_path: Any, num_samples: int | None, split: str = "8,1,1") -> list[Part]:
    common: dict[str, Any] = {"split": split, "name": "train", "seed": 1234, "num_samples": num_samples}
    return [Part(prefix=prefix, weight=weight, **common) for prefix, weight in parse_blend(data_path)]


@pytest.mark.parametrize(
    ("weights", "num_samples"),
    [((0.3, 0.3, 0.4), 1000), ((5, 1, 0.001), 77), (None, 20), (None, None)],
    ids=str,
)
def test_a_blend_equals_the_engines(tmp_path: Path, weights: tuple[float, ...] | None, num_samples: int | None) -> None:
    corpora = [str(tmp_path / name) for name in "abc"]
    for seed, (prefix, num_documents) in enumerate(zip(corpora, (50, 25, 120), strict=True)):
        write_corpus(Path(prefix), num_documents, seed=seed)
    pairs = [item for pair in zip(weights, corpora, strict=True) for item in pair] if weights else corpora

    samples = open_samples(GPT, _parts(pairs, num_samples), str(tmp_path / "cache"))

    assert len(samples) >= (num_samples or 1)
    rows = samples.rows(range(len(samples)))["text"].numpy()
    assert np.array_equal(rows, engine_rows((corpora, weights and list(weights)), num_samples))


@settings(max_examples=100, deadline=None)
@given(
    datasets=st.lists(st.tuples(st.integers(1, 300), st.floats(1e-3, 1e3)), min_size=2, max_size=8),
    num_samples=st.one_of(st.none(), st.integers(1, 500)),
)
def test_no_blend_takes_more_of_a_dataset_than_there_is(
    datasets: list[tuple[int, float]], num_samples: int | None
) -> None:
    counts, weights = zip(*datasets, strict=True)
    mixture = mix(weights, counts, num_samples)

    size = len(mixture.dataset_index)
    if num_samples is None:
        assert not mixture.part_samples.any()
        # One more sample for everyone's share would be one too many for one of them.
        assert (np.array(weights) / sum(weights) * (size + 1) > np.array(counts) - 1e-6).any()
    else:
        assert size >= num_samples
    taken = np.bincount(mixture.dataset_index, minlength=len(datasets))
    assert (taken <= np.where(mixture.part_samples > 0, mixture.part_samples, counts)).all()
    for number, count in enumerate(taken):
        assert np.array_equal(mixture.sample_index[mixture.dataset_index == number], np.arange(count))


def test_a_dataset_without_a_sample_or_with_damage_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "large", 50)
    write_corpus(tmp_path / "small", 1, longest=2)
    parts = _parts([1, str(tmp_path / "large"), 2, str(tmp_path / "small")], None, split="1")

    with pytest.raises(DataError, match=r"gives train 1 of 1 documents of .*small with 1 tokens, .* needs 17; lower"):
        check_parts(GPT, parts, are_used=True)
    assert not (tmp_path / "large").exists()
    (tmp_path / "large.bin").write_bytes((tmp_path / "large.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"large.idx accounts for \d+ bytes, and .bin has"):
        check_parts(GPT, parts, are_used=False)


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
