"""Are BERT's samples Megatron's, and are they what BERT's paper says?"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data.masked import BertObjective, MaskingOptions
from lightning_megatron.data.samples import Rows
from lightning_megatron.data.special_tokens import TokenizerFacts
from tests.unit.data.corpus import opened
from tests.unit.data.sentence_corpus import (
    NUM_PIECES,
    Documents,
    WordPieceTokenizer,
    engine_samples,
    first_text_id,
    part_of,
    random_documents,
    word_pieces,
    write_sentences,
)

ENGINE_CASES = {
    "as usual": (128, True, MaskingOptions(max_ngram=3), 1234),
    "another seed, long rows": (512, True, MaskingOptions(max_ngram=3), 77),
    "short rows": (16, True, MaskingOptions(max_ngram=3), 5),
    "one segment": (128, False, MaskingOptions(max_ngram=3), 1234),
    "single pieces": (128, True, MaskingOptions(max_ngram=1, whole_words=False), 9),
    "much masked, many short": (
        64,
        True,
        MaskingOptions(max_ngram=5, probability=0.6, short_sequence_probability=0.5),
        2**31 - 2,
    ),
    "no short rows": (64, True, MaskingOptions(max_ngram=2, short_sequence_probability=0.0), 3),
}


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_every_field_of_every_sample_is_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    seq_length, sentence_order, masking, seed = ENGINE_CASES[case]
    write_sentences(tmp_path / "corpus", random_documents(40))
    part = part_of(tmp_path / "corpus", num_samples=150, seed=seed)
    objective = BertObjective(
        seq_length=seq_length, tokenizer=word_pieces(), masking=masking, sentence_order=sentence_order
    )
    theirs = engine_samples(
        "bert",
        part,
        masking,
        monkeypatch,
        tmp_path / "engine",
        sequence_length=seq_length,
        classification_head=sentence_order,
    )

    ours = opened(objective, part)

    assert len(ours) == len(theirs) >= 150
    rows = {name: tensor.numpy() for name, tensor in ours.rows(range(len(ours))).items()}
    for index in range(len(theirs)):
        expected = theirs[index]
        row = {name: array[index] for name, array in rows.items()}
        assert np.array_equal(row["input_ids"], expected["text"])
        assert np.array_equal(row["token_type_ids"], expected["types"])
        # The engine takes a token that was replaced by [PAD] at random for padding.
        replaced_by_padding = (row["labels"] != -100) & (row["input_ids"] == 0)
        assert np.array_equal(row["attention_mask"], expected["padding_mask"] | replaced_by_padding)
        assert np.array_equal(np.where(row["labels"] < 0, -1, row["labels"]), expected["labels"])
        assert np.array_equal(row["labels"] != -100, expected["loss_mask"] == 1)
        assert row.get("next_sentence_label", 0) == expected["is_random"]


def _rising_documents(num_documents: int) -> Documents:
    """Each document is a run of rising ids, so that tokens tell their places."""
    random = np.random.default_rng(1)
    documents = []
    for _ in range(num_documents):
        token = first_text_id() + int(random.integers(0, NUM_PIECES // 2))
        lengths = random.integers(1, 20, size=int(random.integers(2, 9))).tolist()
        bounds = token + np.cumsum([0, *lengths])
        documents.append([list(range(*pair)) for pair in zip(bounds, bounds[1:], strict=False)])
    return documents


def _objective(**options: Any) -> BertObjective:
    return BertObjective(**({"seq_length": 256, "tokenizer": word_pieces()} | options))


def _all_rows(prefix: Path, num_samples: int | None = None, **options: Any) -> Rows:
    samples = opened(_objective(**options), part_of(prefix, num_samples))
    return samples.rows(range(len(samples)))


@pytest.mark.parametrize("sentence_order", [True, False])
def test_unmasked_rows_are_neighbouring_sentences_in_order_or_swapped(tmp_path: Path, sentence_order: bool) -> None:
    documents = _rising_documents(60)
    write_sentences(tmp_path / "corpus", documents)
    whole = MaskingOptions(short_sequence_probability=0)
    cls, sep = WordPieceTokenizer.cls, WordPieceTokenizer.sep

    rows = _all_rows(tmp_path / "corpus", masking=whole, sentence_order=sentence_order)

    texts = {tuple(token for sentence in document for token in sentence): document for document in documents[:48]}
    found = set()
    swapped = []
    for row in range(len(rows["labels"])):
        used = int(rows["attention_mask"][row].sum())
        assert (rows["attention_mask"][row][:used] == 1).all()
        tokens = torch.where(rows["labels"] < 0, rows["input_ids"], rows["labels"])[row][:used].tolist()
        types = rows["token_type_ids"][row]
        assert (tokens[0], tokens[-1]) == (cls, sep)
        if not sentence_order:
            assert not types.any()
            found.add(tuple(tokens[1:-1]))
            continue
        middle = tokens.index(sep)
        first, second = tokens[1:middle], tokens[middle + 1 : -1]
        assert torch.equal(types[:used], (torch.arange(used) > middle).long())
        assert not types[used:].any()
        swapped.append(int(rows["next_sentence_label"][row]))
        assert swapped[-1] == (first[0] > second[0])
        if swapped[-1]:
            first, second = second, first
        found.add((*first, *second))
        # The cut is between sentences.
        assert any(sentence[0] == second[0] for sentence in texts[(*first, *second)])
    # Every document fits into a row, so each is one sample.
    assert found == set(texts)
    if sentence_order:
        # Five standard deviations of a fair coin.
        assert abs(np.mean(swapped) - 0.5) < 5 * 0.5 / len(swapped) ** 0.5
    else:
        assert "next_sentence_label" not in rows


def test_as_many_tokens_are_masked_replaced_and_kept_as_the_paper_says(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", random_documents(300, seed=5))
    rows = {name: tensor.numpy() for name, tensor in _all_rows(tmp_path / "corpus").items()}
    chosen = rows["labels"] != -100
    lengths = rows["attention_mask"].sum(axis=1)

    # A word may not fit into what is left of the budget; it is rounded to whole tokens, at least one.
    share = chosen.sum() / lengths.sum()
    assert 0.14 < share < 0.153

    count = int(chosen.sum())
    now, before = rows["input_ids"][chosen], rows["labels"][chosen]
    masked = (now == WordPieceTokenizer.mask).mean()
    kept = (now == before).mean()
    replaced = 1 - masked - kept
    size = word_pieces().size
    # Five standard deviations of a binomial; a random token is the mask or the token itself now and then.
    for share, expected in ((masked, 0.8 + 0.1 / size), (kept, 0.1 + 0.1 / size), (replaced, 0.1 - 0.2 / size)):
        assert abs(share - expected) < 5 * (expected * (1 - expected) / count) ** 0.5
    others = now[(now != before) & (now != WordPieceTokenizer.mask)]
    assert len(set(others.tolist())) > 0.5 * min(size, len(others))
    assert not np.isin(before, [WordPieceTokenizer.cls, WordPieceTokenizer.sep]).any()


def _with_other_marks(facts: TokenizerFacts) -> TokenizerFacts:
    """The same ids, one piece in three beginning a word: as with SentencePiece or byte-level BPE."""
    begins = facts.begins_word.copy()
    begins[first_text_id() :] = np.arange(NUM_PIECES) % 3 == 1
    return replace(facts, begins_word=begins)


@pytest.mark.parametrize("tokenizer", [word_pieces(), _with_other_marks(word_pieces())])
def test_whole_words_are_masked_or_nothing_of_them(tmp_path: Path, tokenizer: TokenizerFacts) -> None:
    begin = first_text_id()
    assert not tokenizer.begins_word[begin]
    # Sentences begin with a piece that would continue a word, and have it nowhere else.
    documents = [
        [[begin, *(max(token, begin + 1) for token in sentence[1:])] for sentence in document]
        for document in random_documents(60, sentences=6)
    ]
    write_sentences(tmp_path / "corpus", documents)
    rows = _all_rows(tmp_path / "corpus", seq_length=512, tokenizer=tokenizer)

    texts = torch.where(rows["labels"] < 0, rows["input_ids"], rows["labels"]).numpy()
    beginnings = []
    for text, chosen, used in zip(texts, (rows["labels"] != -100).numpy(), rows["attention_mask"].sum(1), strict=True):
        for place in range(2, int(used)):
            if text[place - 1] >= begin and text[place] == begin:
                beginnings.append(chosen[place] != chosen[place - 1])
            elif text[place - 1] >= begin and not tokenizer.begins_word[text[place]]:
                assert chosen[place] == chosen[place - 1]
    assert 0 < sum(beginnings) < len(beginnings)


def test_a_sample_is_the_same_in_any_batch_process_and_run(tmp_path: Path) -> None:
    write_sentences(tmp_path / "corpus", random_documents(50))
    (tmp_path / "index").mkdir()
    part = part_of(tmp_path / "corpus", num_samples=100)
    built = _objective().open(part, str(tmp_path / "index"))
    time = [path.stat().st_mtime_ns for path in (tmp_path / "index").iterdir()]
    expected = built.rows(range(100))

    found = _objective().open(part, str(tmp_path / "index"))

    assert [path.stat().st_mtime_ns for path in (tmp_path / "index").iterdir()] == time
    for samples in (built, found, pickle.loads(pickle.dumps(found)), opened(_objective(), part)):
        assert samples.fingerprint == built.fingerprint
        order = [99, 7, 50, 7]
        for name, tensor in samples.rows(order).items():
            assert torch.equal(tensor, expected[name][order])
    # The index itself stays where it is.
    assert len(pickle.dumps(found)) == len(pickle.dumps(_objective().open(part, str(tmp_path / "index"))))
