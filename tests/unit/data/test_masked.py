"""BERT and T5 samples equal Megatron's for WordPiece; otherwise they follow the released models and papers."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from lightning_megatron.data.masked import MaskingOptions
from lightning_megatron.data.masked_bert import BertObjective
from lightning_megatron.data.masked_t5 import T5Objective
from lightning_megatron.data.samples import Samples
from lightning_megatron.errors import ConfigError
from tests.unit.data.corpus import Documents, build, opened
from tests.unit.data.sentence_corpus import (
    NUM_PIECES,
    engine_samples,
    first_text_id,
    part_of,
    random_documents,
    word_pieces,
)

MaskedObjective: TypeAlias = BertObjective | T5Objective

WORD = first_text_id() + 1
LONG = [WORD] * 513
FEW = replace(word_pieces(), sentinels=word_pieces().sentinels[:4])
_DEFAULTS = {"seq_length": 64, "tokenizer": word_pieces()}


def _bert(**options: Any) -> BertObjective:
    return BertObjective(**{**_DEFAULTS, **options})


def _t5(**options: Any) -> T5Objective:
    return T5Objective(**{**_DEFAULTS, "seq_length_decoder": 64, **options})


def _open(
    objective: MaskedObjective,
    prefix: Path,
    num_samples: int | None = None,
) -> Samples:
    return opened(objective, part_of(prefix, num_samples))  # type: ignore[no-any-return]


# ---- compared with Megatron -----------------------------------------------------------------------------------------

MUCH_MASKED: dict[str, Any] = {"probability": 0.6, "short_sequence_probability": 0.5}
ENGINE_CASES: dict[str, tuple[MaskedObjective, int]] = {
    "bert": (
        _bert(seq_length=128, masking=MaskingOptions(max_ngram=3)),
        1234,
    ),
    "bert, one segment": (
        _bert(seq_length=128, sentence_order=False, masking=MaskingOptions(max_ngram=3)),
        1234,
    ),
    "bert, short rows of pieces": (
        _bert(seq_length=16, masking=MaskingOptions(max_ngram=1, whole_words=False)),
        5,
    ),
    "bert, much masked": (_bert(masking=MaskingOptions(max_ngram=5, **MUCH_MASKED)), 2**31 - 2),
    "t5": (
        _t5(
            seq_length=128,
            masking=MaskingOptions(max_ngram=10),
            format="megatron",
        ),
        1234,
    ),
    "t5, much masked": (
        _t5(
            seq_length_decoder=128,
            masking=MaskingOptions(max_ngram=4, **MUCH_MASKED),
            format="megatron",
        ),
        2**31 - 2,
    ),
}


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_every_field_of_every_sample_equals_megatrons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    objective, seed = ENGINE_CASES[case]
    # Megatron skips documents with a long sentence, except documents of a single sentence.
    build(
        tmp_path / "corpus",
        [
            *random_documents(30),
            [LONG, [WORD]],
            [LONG],
            *random_documents(10, seed=1),
        ],
    )
    part = part_of(tmp_path / "corpus", num_samples=150, seed=seed)
    config: dict[str, Any] = {"sequence_length": objective.seq_length}
    if isinstance(objective, T5Objective):
        config["sequence_length_decoder"] = objective.seq_length_decoder
        names = {"input_ids": "text_enc", "attention_mask": "enc_mask"}
    else:
        config["classification_head"] = objective.sentence_order
        names = {"input_ids": "text", "token_type_ids": "types", "attention_mask": "padding_mask"}
    theirs = engine_samples(
        objective.name, part, objective.masking, monkeypatch, tmp_path / "engine", **config
    )

    ours = opened(objective, part)

    assert len(ours) == len(theirs) >= 150
    tensors = ours.rows(range(len(ours)))
    rows = {name: tensor.numpy() for name, tensor in tensors.items()}
    for index in range(len(theirs)):
        expected = theirs[index]
        row = {name: array[index] for name, array in rows.items()}
        if objective.name == "bert":
            # Megatron counts a token that masking replaced by a random [PAD] as padding.
            expected["padding_mask"] |= (row["labels"] != -100) & (row["input_ids"] == 0)
            assert row.get("next_sentence_label", 0) == expected["is_random"]
        for name, their_name in names.items():
            assert np.array_equal(row[name], expected[their_name]), name
        assert np.array_equal(
            np.where(
                row["labels"] < 0,
                -1,
                row["labels"],
            ),
            expected["labels"],
        )
        assert np.array_equal(row["labels"] != -100, expected["loss_mask"] == 1)


# ---- BERT -----------------------------------------------------------------------------------------------------------


def test_whole_words_are_masked_with_other_word_marks(tmp_path: Path) -> None:
    """Every third piece starts a word, as with SentencePiece or byte-level BPE."""
    begin = first_text_id()
    begins_word = word_pieces().begins_word.copy()
    begins_word[begin:] = np.arange(NUM_PIECES) % 3 == 1
    tokenizer = replace(word_pieces(), begins_word=begins_word)
    # A word-continuing piece starts every sentence and occurs nowhere else.
    documents = [
        [[begin, *(max(token, begin + 1) for token in sentence[1:])] for sentence in document]
        for document in random_documents(60, sentences=6)
    ]
    build(tmp_path / "corpus", documents)
    samples = _open(_bert(seq_length=512, tokenizer=tokenizer), tmp_path / "corpus")
    rows = samples.rows(range(len(samples)))

    texts = torch.where(
        rows["labels"] < 0,
        rows["input_ids"],
        rows["labels"],
    ).numpy()
    is_masked = (rows["labels"] != -100).numpy()
    lengths = rows["attention_mask"].sum(1)
    differences = []
    for text, masked, used in zip(texts, is_masked, lengths, strict=True):
        for position in range(2, int(used)):
            if text[position - 1] >= begin and text[position] == begin:
                differences.append(masked[position] != masked[position - 1])
            elif text[position - 1] >= begin and not tokenizer.begins_word[text[position]]:
                assert masked[position] == masked[position - 1]
    assert 0 < sum(differences) < len(differences)


# ---- T5 -------------------------------------------------------------------------------------------------------------


def test_spans_beyond_the_sentinels_stay_unmasked(tmp_path: Path) -> None:
    """Released models' format ends with a sentinel, so one span fewer fits; tests/golden compares complete rows."""
    build(tmp_path / "corpus", random_documents(30))
    samples = _open(_t5(seq_length=128, tokenizer=FEW), tmp_path / "corpus")
    counts = np.isin(samples.rows(range(len(samples)))["input_ids"], FEW.sentinels).sum(1)
    assert counts.max() == len(FEW.sentinels) - 1
    assert (counts == counts.max()).mean() > 0.3


# ---- refusals -------------------------------------------------------------------------------------------------------


def _count_samples(documents: Any, objective: MaskedObjective) -> Callable[[Path], object]:
    return lambda folder: objective.count(
        part_of(Path(build(folder / "corpus", documents)), num_samples=100)
    )


def _read_token(token: int) -> Callable[[Path], object]:
    documents: Documents = [[[WORD, token], [WORD]]] * 20
    return lambda folder: _open(
        _bert(), Path(build(folder / "corpus", documents, dtype="int32"))
    ).rows([0])


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda _: MaskingOptions(probability=0.0),
        "probability=0.0 must be more than 0 and less than 1",
    ),
    (
        lambda _: MaskingOptions(short_sequence_probability=1.7),
        "short_sequence_probability=1.7 must be from 0 to 1",
    ),
    (
        lambda _: _t5(seq_length=128, seq_length_decoder=20),
        "seq_length_decoder=20 is too small: 15% of seq_length=",
    ),
    (lambda _: _t5(tokenizer=replace(FEW, sentinels=())), "has too few sentinels .* for T5"),
    (
        lambda _: _bert(tokenizer=replace(FEW, special={"sep": 2})),
        "has no cls_token, no mask_token, which BERT",
    ),
    # Megatron would loop forever.
    (
        _count_samples([[[WORD] * 5]] * 20, _bert()),
        "gives train 16 of 20 documents of .* none of two or more sentences",
    ),
    (
        _count_samples([[LONG, [WORD]]] * 20, _t5()),
        "16 of 20 documents of .* sentences of at most 512 tokens; give",
    ),
    (
        _count_samples([[[], []]] * 19 + [[[WORD]]], _t5()),
        "gives train 16 of 20 documents of .* with 0 tokens",
    ),
    (_read_token(word_pieces().size), "corpus has token 507, word-pieces has 0 to 506"),
    (_read_token(-1), "corpus has token -1, word-pieces has 0 to"),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED)
def test_invalid_settings_and_datasets_are_refused(
    tmp_path: Path, attempt: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt(tmp_path)


def test_skipped_documents_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "corpus", [[LONG, [WORD]], *random_documents(9)])
    _open(_t5(), tmp_path / "corpus")
    assert re.search(
        r"1 of 8 documents of .*corpus \(train\) are left out, as by Megatron: a sample is",
        caplog.text,
    )
