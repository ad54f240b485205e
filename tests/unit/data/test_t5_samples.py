"""Are T5's spans Megatron's, and its rows those of the released models?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.data.samples.masking import MaskingOptions
from lightning_megatron.data.samples.t5 import T5Objective
from tests.unit.data.sentence_corpus import engine_samples, part_of, random_documents, word_pieces, write_sentences

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

    ours = objective.open(part, "")

    assert len(ours) == len(theirs) >= 150
    rows = {name: tensor.numpy() for name, tensor in ours.rows(range(len(ours))).items()}
    for index in range(len(theirs)):
        expected = theirs[index]
        row = {name: array[index] for name, array in rows.items()}
        assert np.array_equal(row["input_ids"], expected["text_enc"])
        assert np.array_equal(row["attention_mask"], expected["enc_mask"])
        assert np.array_equal(np.where(row["labels"] < 0, -1, row["labels"]), expected["labels"])
        assert np.array_equal(row["labels"] != -100, expected["loss_mask"] == 1)
