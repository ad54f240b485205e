"""Blends are read as they are meant, taken in Megatron's order, and never short of samples where the engine is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
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
from lightning_megatron.data.masked import BertObjective, T5Objective
from lightning_megatron.data.samples import Objective, Samples, SplitName
from lightning_megatron.errors import ConfigError, DataError
from tests.unit.data.corpus import opened, write_corpus
from tests.unit.data.engine_samples import engine_dataset, engine_rows
from tests.unit.data.sentence_corpus import random_documents, word_pieces, write_sentences

SEQ_LENGTH = 16


@pytest.mark.parametrize(
    ("data_path", "sources"),
    [
        ("books", [("books", None)]),
        (["books"], [("books", None)]),
        (["books", "web"], [("books", None), ("web", None)]),
        ([0.7, "books", 0.3, "web"], [("books", 0.7), ("web", 0.3)]),
        (["70", "books", "3e1", "web"], [("books", 70), ("web", 30)]),
        ((1, "books"), [("books", 1)]),
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
        ([], r"data_path=\[\] names no dataset"),
        (["a", " "], r"data_path\[1\]=' ' names no dataset"),
        ("30", r"data_path\[0\]='30' stands where a prefix belongs: .* write './30'"),
        (
            ["books", 0.5, "web", 0.5],
            r"data_path\[1\]=0.5 stands where a prefix belongs: weights and prefixes stand",
        ),
        (
            [0.5, "books", "web"],
            "has 3 items, but weights and prefixes stand in turn, .* a weight or a prefix is missing",
        ),
        ([0.5, "books", "web", 0.5], r"data_path\[2\]='web' stands where a weight belongs"),
        ([-1, "books", 2, "web"], r"data_path\[0\]=-1 is no weight"),
        ([float("inf"), "books", 2, "web"], r"data_path\[0\]=inf is no weight"),
        ([True, "books", 2, "web"], r"data_path\[0\]=True is no weight"),
        ([0, "books", "0.0", "web"], "gives every dataset the weight 0"),
        (["books", "web", "./books"], r"has ./books twice; give it once"),
        ([1, "books", 0, "x/../books"], r"has x/../books twice"),
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


@pytest.mark.parametrize("num_samples", [1, 77, 400, 1000])
@pytest.mark.parametrize("weights", [(0.3, 0.3, 0.4), (5, 1, 0.001), (1, 1, 1)], ids=str)
def test_a_weighted_blend_equals_the_engines(
    corpora: list[str], tmp_path: Path, weights: tuple[float, ...], num_samples: int
) -> None:
    theirs = engine_dataset((corpora, list(weights)), split="8,1,1", name="train", num_samples=num_samples)
    pairs = [item for pair in zip(weights, corpora, strict=True) for item in pair]

    samples = open_samples(_request(pairs, num_samples), str(tmp_path))

    assert len(samples) >= num_samples
    assert np.array_equal(_rows(samples), engine_rows(theirs))


@pytest.mark.parametrize("num_samples", [None, 1, 20])
@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_blend_by_size_equals_the_engines(
    corpora: list[str], tmp_path: Path, name: SplitName, num_samples: int | None
) -> None:
    theirs = engine_dataset((corpora, None), split="8,1,1", name=name, num_samples=num_samples)

    samples = open_samples(_request(corpora, num_samples, name), str(tmp_path))

    assert np.array_equal(_rows(samples), engine_rows(theirs))


def _write(prefix: str, documents: list[NDArray[np.uint16]]) -> None:
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for tokens in documents:
            writer.add_documents(tokens.tobytes(), [len(tokens)])


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


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("num_samples", [None, 300])
def test_samples_of_sentences_blend_as_well(tmp_path: Path, kind: str, num_samples: int | None) -> None:
    objective: Objective = BertObjective(seq_length=64, tokenizer=word_pieces())
    if kind == "t5":
        objective = T5Objective(seq_length=64, seq_length_decoder=32, tokenizer=word_pieces())
    prefixes = [str(tmp_path / str(number)) for number in range(2)]
    for number, prefix in enumerate(prefixes):
        write_sentences(Path(prefix), random_documents(30 + 30 * number, seed=number))
    request = replace(_request(prefixes, num_samples), objective=objective)

    samples = open_samples(request, str(tmp_path))

    rows = samples.rows(range(len(samples)))
    assert len(samples) == (check_request(request) if num_samples is None else num_samples)
    mixture = mix(request.sources, [objective.count(request.part(each, None)) for each in request.sources], num_samples)
    for number, source in enumerate(request.sources):
        part = request.part(source, int(mixture.part_samples[number]) or None)
        places = np.flatnonzero(mixture.dataset_index == number)
        own = opened(objective, part).rows(range(len(places)))
        assert all(torch.equal(rows[key][places], own[key]) for key in own)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_dataset_without_a_sample_is_named(tmp_path: Path, weighted: bool) -> None:
    write_corpus(tmp_path / "large", 50)
    _write(str(tmp_path / "small"), [np.zeros(SEQ_LENGTH, dtype=np.uint16)])
    prefixes = [str(tmp_path / "large"), str(tmp_path / "small")]
    data_path: list[str | float] = [1, prefixes[0], 2, prefixes[1]] if weighted else [*prefixes]

    with pytest.raises(DataError, match=r"gives train 1 of 1 documents of .*small with 16 tokens, .* needs 17; lower"):
        check_request(_request(data_path, None, split="1"))
    assert not (tmp_path / "large").exists()


def test_every_dataset_of_a_blend_is_checked(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", 50)
    write_corpus(tmp_path / "b", 50)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    check_request(_request(paths, None))
    data = (tmp_path / "b.bin").read_bytes()
    (tmp_path / "b.bin").write_bytes(data[:-2])

    with pytest.raises(DataError, match=r"b.bin has .* bytes, b.idx accounts for"):
        check_request(_request(paths, None))
    (tmp_path / "b.bin").unlink()
    with pytest.raises(DataError, match=r"data_path=.*/b needs two files, missing: .*b.bin"):
        check_request(_request(paths, None))
