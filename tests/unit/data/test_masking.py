"""Are n-grams drawn as they should be, and impossible settings and datasets refused?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.masked import BertObjective, MaskingOptions, T5Objective, masked_ngrams
from lightning_megatron.errors import ConfigError, DataError
from tests.unit.data.corpus import opened
from tests.unit.data.sentence_corpus import (
    SPLIT,
    Documents,
    first_text_id,
    part_of,
    random_documents,
    word_pieces,
    write_sentences,
)

WORD = first_text_id() + 1


def _bert(**options: Any) -> BertObjective:
    return BertObjective(tokenizer=word_pieces(), **({"seq_length": 64} | options))


def _t5(**options: Any) -> T5Objective:
    return T5Objective(tokenizer=word_pieces(), **({"seq_length": 64, "seq_length_decoder": 64} | options))


@pytest.mark.parametrize("budget", [1, 7.35, 40, 1000])
def test_ngrams_keep_to_the_budget_and_to_words_and_never_overlap(budget: float) -> None:
    random = np.random.default_rng(0)
    for seed in range(50):
        bounds = [0, *np.cumsum(random.integers(1, 5, size=60)).tolist()]
        state = np.random.RandomState(seed)

        spans = list(masked_ngrams(bounds, budget, lambda draw=state.randint: int(draw(1, 5)), state))

        covered = [place for begin, end in spans for place in range(begin, end)]
        assert len(covered) == len(set(covered)) <= budget
        assert {place for span in spans for place in span} <= set(bounds)
        assert all(1 <= bounds.index(end) - bounds.index(begin) <= 4 for begin, end in spans)
        # What is left of the budget holds no word that is still free, unless n-grams in the way were drawn first.
        assert budget >= bounds[-1] or len(covered) > budget - 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 0.0}, "probability=0.0 must be more than 0 and less than 1"),
        ({"probability": 1.0}, "probability=1.0 must be"),
        ({"probability": float("nan")}, "probability=nan must be"),
        ({"short_sequence_probability": -0.1}, "short_sequence_probability=-0.1 must be 0 or close to one in a whole"),
        ({"short_sequence_probability": 0.7}, "short_sequence_probability=0.7 must be 0 or close"),
        ({"short_sequence_probability": 1e-12}, "short_sequence_probability=1e-12 must be 0 or close"),
        ({"short_sequence_probability": float("nan")}, "short_sequence_probability=nan must be 0 or close"),
        ({"max_ngram": 0}, "max_ngram=0 words must be at least 1; leave it out"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskingOptions(**options)


@pytest.mark.parametrize(("make", "least"), [(_bert, 10), (_t5, 9)])
def test_the_shortest_rows_have_a_masked_token(tmp_path: Path, make: Any, least: int) -> None:
    """15 % of 7 tokens are one, of 6 none."""
    with pytest.raises(
        ConfigError, match=f"seq_length={least - 1} is too small: a row has .*; choose at least {least}"
    ):
        make(seq_length=least - 1)
    with pytest.raises(ConfigError, match="seq_length=3 is too small: a row has . special tokens"):
        make(seq_length=3, masking=MaskingOptions(probability=0.9))

    write_sentences(tmp_path / "corpus", [[[WORD] * 9, [WORD] * 9]] * 20)
    samples = opened(
        make(seq_length=least, masking=MaskingOptions(short_sequence_probability=0)), part_of(tmp_path / "corpus")
    )
    rows = samples.rows(range(len(samples)))
    assert (rows["attention_mask"].sum(1) >= least - 1).all()
    targets = (rows["labels"] != -100).sum(1)
    assert (targets == (1 if make is _bert else 4)).all()  # two sentinels and eos


def test_impossible_rows_of_a_decoder_are_refused() -> None:
    with pytest.raises(ConfigError, match="seq_length_decoder=20 is too small: 15% of seq_length=128 are 18 tokens in"):
        _t5(seq_length=128, seq_length_decoder=20)
    with pytest.raises(ConfigError, match="format='hf' must be one of hugging_face, megatron"):
        _t5(format="hf")


LONG = [WORD] * 513


@pytest.mark.parametrize(
    ("documents", "objective", "message"),
    [
        ([[[WORD] * 5]] * 20, _bert(), "gives train 16 of 20 documents of .*, none with two sentences.*--split-sent"),
        ([[LONG, LONG]] * 20, _bert(), "16 of 20 documents of .*, 16 of them with a sentence of more than 512 tokens"),
        ([[LONG, [WORD]]] * 20, _t5(), "16 of 20 documents of .*, 16 of them with a sentence of more than 512 tokens"),
        ([[[], []]] * 20, _t5(), "gives train 16 of 20 documents of .*, none with any token"),
        ([[[WORD], [WORD]]], _bert(), "split='0,1' gives train 0 of 1 documents"),
    ],
)
def test_documents_without_a_sample_end_in_an_error_not_in_waiting(
    tmp_path: Path, documents: Documents, objective: BertObjective | T5Objective, message: str
) -> None:
    write_sentences(tmp_path / "corpus", documents)
    part = part_of(tmp_path / "corpus", num_samples=100)
    if len(documents) == 1:
        part = replace(part, split="0,1")

    for use in (objective.count, lambda part: opened(objective, part)):
        with pytest.raises(DataError, match=message):
            use(part)


@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_document_with_a_long_sentence_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    # A split has eight documents, its neighbour two, which are no business of its own.
    two, others = [[[WORD]] * 200, [LONG, LONG]], random_documents(5)
    without = _t5_rows(tmp_path / "without", [*others, *others[:3]], two, name)
    assert caplog.text == ""

    with_long = [*others[:3], [LONG, [WORD]], *others[3:], [[WORD], LONG], *others[:2], [LONG[:512], LONG], others[2]]
    rows = _t5_rows(tmp_path / "with", with_long, two, name)

    assert "3 of 11 documents of " in caplog.text
    assert f"({name}) have a sentence of more than 512 tokens and are left out, as by Megatron" in caplog.text
    assert np.array_equal(rows, without)


def _t5_rows(prefix: Path, documents: Documents, others: Documents, name: str) -> Any:
    write_sentences(prefix, [*documents, *others] if name == "train" else [*others, *documents])
    weights = {name: len(documents), "other": len(others)}
    split = f"{weights['train']},{weights['other']}" if name == "train" else f"{weights['other']},{weights['valid']}"
    samples = opened(_t5(), replace(part_of(prefix, num_samples=30, name=name), split=split))
    return samples.rows(range(len(samples)))["input_ids"].numpy()


@pytest.mark.parametrize("token", [word_pieces().size, -1])
@pytest.mark.parametrize("objective", [_bert(), _t5()])
def test_ids_that_the_tokenizer_has_not_are_refused(
    tmp_path: Path, objective: BertObjective | T5Objective, token: int
) -> None:
    write_sentences(tmp_path / "corpus", [[[WORD, token], [WORD]]] * 20, dtype="<i4")
    samples = opened(objective, part_of(tmp_path / "corpus"))

    with pytest.raises(DataError, match=f"corpus has the token {token}, ids of the tokenizer word-pieces are from 0"):
        samples.rows([0])


@pytest.mark.parametrize("objective", [_bert(), _bert(sentence_order=False), _t5()])
def test_one_pass_has_as_many_samples_as_were_counted(tmp_path: Path, objective: BertObjective | T5Objective) -> None:
    write_sentences(tmp_path / "corpus", random_documents(50))
    part = part_of(tmp_path / "corpus")

    count = objective.count(part)

    assert count == len(opened(objective, part)) > 50
    assert len(opened(objective, part_of(tmp_path / "corpus", num_samples=3 * count))) >= 3 * count


def test_the_split_is_over_documents(tmp_path: Path) -> None:
    assert SPLIT == "8,1,1"
    write_sentences(tmp_path / "corpus", [[[WORD + 1 + 3 * (number // 8)] * 9] * 2 for number in range(10)])
    seen = {}
    for name in ("train", "valid", "test"):
        samples = opened(_t5(), part_of(tmp_path / "corpus", name=name))
        seen[name] = {token - WORD - 1 for token in samples.rows(range(len(samples)))["input_ids"][:, 0].tolist()}

    assert len(seen["train"]) >= 1
    assert 3 not in seen["train"]
    assert 0 not in seen["valid"] | seen["test"]
