"""Are T5's spans Megatron's, and its rows those of the released models?"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data.masked import MaskingOptions, T5Objective
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.special_tokens import TokenizerFacts
from tests.unit.data.corpus import opened
from tests.unit.data.sentence_corpus import (
    WordPieceTokenizer,
    engine_samples,
    first_text_id,
    part_of,
    random_documents,
    word_pieces,
    write_sentences,
)

EOS = WordPieceTokenizer.eos

ENGINE_CASES = {
    "as usual": (128, 64, MaskingOptions(max_ngram=10), 1234),
    "another seed, long rows": (512, 256, MaskingOptions(max_ngram=10), 77),
    "short rows": (16, 16, MaskingOptions(max_ngram=10), 5),
    "single pieces": (128, 64, MaskingOptions(max_ngram=3, whole_words=False), 9),
    "much masked, many short": (
        64,
        128,
        MaskingOptions(max_ngram=4, probability=0.6, short_sequence_probability=0.5),
        2**31 - 2,
    ),
}


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_every_field_of_every_sample_is_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    seq_length, seq_length_decoder, masking, seed = ENGINE_CASES[case]
    write_sentences(tmp_path / "corpus", random_documents(40))
    part = part_of(tmp_path / "corpus", num_samples=150, seed=seed)
    objective = T5Objective(
        seq_length=seq_length,
        seq_length_decoder=seq_length_decoder,
        tokenizer=word_pieces(),
        masking=masking,
        format="megatron",
    )
    theirs = engine_samples(
        "t5",
        part,
        masking,
        monkeypatch,
        tmp_path / "engine",
        sequence_length=seq_length,
        sequence_length_decoder=seq_length_decoder,
    )

    ours = opened(objective, part)

    assert len(ours) == len(theirs) >= 150
    rows = {name: tensor.numpy() for name, tensor in ours.rows(range(len(ours))).items()}
    for index in range(len(theirs)):
        expected = theirs[index]
        row = {name: array[index] for name, array in rows.items()}
        assert np.array_equal(row["input_ids"], expected["text_enc"])
        assert np.array_equal(row["attention_mask"], expected["enc_mask"])
        assert np.array_equal(np.where(row["labels"] < 0, -1, row["labels"]), expected["labels"])
        assert np.array_equal(row["labels"] != -100, expected["loss_mask"] == 1)


def _objective(**options: Any) -> T5Objective:
    return T5Objective(**({"seq_length": 128, "seq_length_decoder": 64, "tokenizer": word_pieces()} | options))


def _opened(prefix: Path, num_samples: int | None = None, **options: Any) -> Samples:
    return opened(_objective(**options), part_of(prefix, num_samples))


def test_rows_are_those_of_the_released_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of Hugging Face's documentation: "The cute dog walks in the park"."""
    the, cute, dog, walks, in_, the_, park = text = list(range(first_text_id(), first_text_id() + 7))
    write_sentences(tmp_path / "corpus", [[text]] * 10)
    monkeypatch.setattr("lightning_megatron.data.masked.masked_ngrams", lambda *_: iter([(5, 6), (1, 3)]))
    first, second, third = word_pieces().sentinels[:3]
    samples = _opened(tmp_path / "corpus", seq_length=16, seq_length_decoder=16)

    rows = {name: tensor[0].tolist() for name, tensor in samples.rows([0]).items()}

    expected = [the, first, walks, in_, second, park, EOS]
    assert rows["input_ids"] == expected + [0] * 9
    assert rows["attention_mask"] == [1] * 7 + [0] * 9
    assert rows["labels"] == [first, cute, dog, second, the_, third, EOS] + [-100] * 9

    megatron = _opened(tmp_path / "corpus", seq_length=16, seq_length_decoder=16, format="megatron")
    rows = {name: tensor[0].tolist() for name, tensor in megatron.rows([0]).items()}
    assert rows["input_ids"] == expected[:-1] + [0] * 10
    assert rows["labels"] == [first, cute, dog, second, the_, EOS] + [-100] * 10


def _put_back(inputs: Sequence[int], labels: Sequence[int], facts: TokenizerFacts) -> tuple[list[int], int]:
    """The text with its spans, and how many there were."""
    spans: dict[int, list[int]] = {}
    span: list[int] = []
    for label in labels:
        if label in facts.sentinels:
            span = spans.setdefault(label, [])
        else:
            span.append(label)
    text: list[int] = []
    for token in inputs:
        text += spans[token] if token in facts.sentinels else [token]
    return text, len(spans)


FEW = replace(word_pieces(), sentinels=word_pieces().sentinels[:4])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": "megatron"},
        {"tokenizer": FEW},
        {"tokenizer": FEW, "format": "megatron"},
        {"masking": MaskingOptions(short_sequence_probability=0, max_ngram=1, probability=0.4), "seq_length": 512,
         "seq_length_decoder": 411, "tokenizer": word_pieces()},
        {"masking": MaskingOptions(short_sequence_probability=0, whole_words=False), "seq_length_decoder": 24},
    ],
)  # fmt: skip
def test_text_and_labels_give_back_the_documents(tmp_path: Path, options: dict[str, Any]) -> None:
    documents = random_documents(80)
    write_sentences(tmp_path / "corpus", documents)
    objective = _objective(**options)
    samples = opened(objective, part_of(tmp_path / "corpus"))
    facts, hugging_face = objective.tokenizer, objective.format == "hugging_face"
    starts = {tuple(sum(document[first:], [])) for document in documents[:64] for first in range(len(document))}

    rows = samples.rows(range(len(samples)))

    counts = []
    for tokens, attention, row in zip(rows["input_ids"], rows["attention_mask"], rows["labels"], strict=True):
        used, answered = int(attention.sum()), int((row != -100).sum())
        assert (attention[:used] == 1).all()
        assert (row[:answered] >= 0).all()
        inputs, labels = tokens[:used].tolist(), row[:answered].tolist()
        assert labels.pop() == EOS
        if hugging_face:
            assert inputs.pop() == EOS
            last = labels.pop()
            assert last not in inputs
            assert last == facts.sentinels[sum(token in facts.sentinels for token in inputs)]
        in_text = [token for token in inputs if token in facts.sentinels]
        assert in_text == [label for label in labels if label in facts.sentinels]
        assert in_text == list(facts.sentinels[: len(in_text)])
        text, count = _put_back(inputs, labels, facts)
        assert any(tuple(text) == start[: len(text)] for start in starts)
        counts.append(count)
    assert max(counts) <= len(facts.sentinels) - hugging_face
    if facts is FEW:
        assert counts.count(len(facts.sentinels) - hugging_face) > 0.3 * len(counts)


def test_a_few_sentinels_for_long_rows_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sentences(tmp_path / "corpus", random_documents(20))

    _opened(tmp_path / "corpus", tokenizer=FEW, seq_length=512, seq_length_decoder=128)

    assert "Rows of seq_length=512 have about 17 spans, the tokenizer word-pieces has sentinels for 3" in caplog.text
    caplog.clear()
    _opened(tmp_path / "corpus", seq_length=512, seq_length_decoder=128)
    assert caplog.text == ""


def test_the_share_of_masked_tokens_is_what_was_asked_for(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", [[sum(document, [])] for document in random_documents(300)])
    rows = _opened(tmp_path / "corpus", seq_length=512, seq_length_decoder=128).rows(range(240))
    sentinels = torch.tensor(word_pieces().sentinels)

    spans = torch.isin(rows["input_ids"], sentinels).sum()
    hidden = (rows["labels"] != -100).sum() - spans - 2 * 240
    kept = rows["attention_mask"].sum() - spans - 240

    # A word may not fit into what is left of the budget.
    assert 0.14 < hidden / (hidden + kept) < 0.153


def test_an_end_that_documents_have_already_is_not_doubled_or_masked(tmp_path: Path) -> None:
    documents = [[[*sum(document, [])[:100], EOS]] for document in random_documents(80)]
    write_sentences(tmp_path / "corpus", documents)
    objective = _objective(masking=MaskingOptions(short_sequence_probability=0))
    samples = opened(objective, part_of(tmp_path / "corpus"))

    for row in samples.rows(range(len(samples)))["input_ids"]:
        assert row.tolist().count(EOS) == 1


def test_a_text_that_cannot_be_masked_is_its_own_answers_beginning(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", [[[EOS]], [[]], [[EOS, EOS]]] * 4)
    first = word_pieces().sentinels[0]

    rows = _opened(tmp_path / "corpus").rows(range(10))

    assert (rows["labels"][:, :2] == torch.tensor([first, EOS])).all()
    assert (rows["labels"][:, 2:] == -100).all()
    assert set(rows["attention_mask"].sum(1).tolist()) == {1, 2}


def test_a_sample_is_the_same_in_any_batch_process_and_run(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", random_documents(50))
    part = part_of(tmp_path / "corpus", num_samples=100)
    (tmp_path / "index").mkdir()
    built = _objective().open(part, str(tmp_path / "index"))
    expected = built.rows(range(100))

    found = _objective().open(part, str(tmp_path / "index"))

    for samples in (built, found, pickle.loads(pickle.dumps(found)), pickle.loads(pickle.dumps(_objective()))):
        samples = opened(samples, part) if isinstance(samples, T5Objective) else samples
        order = [99, 7, 50, 7]
        assert samples.fingerprint == built.fingerprint
        for name, tensor in samples.rows(order).items():
            assert torch.equal(tensor, expected[name][order])
            assert tensor.dtype == torch.int64
