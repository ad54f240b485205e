"""Are BERT's samples Megatron's, and are they what BERT's paper says?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.samples.bert import BertObjective
from lightning_megatron.data.samples.masking import MaskingOptions
from tests.unit.data.sentence_corpus import engine_samples, part_of, random_documents, word_pieces, write_sentences

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

    ours = objective.open(part, "")

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
