"""The trained tokenizer is lossless and loads in transformers; what is wrong with one is told."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lightning_megatron.data.tokenizer import (
    END_OF_TEXT,
    TokenizerFacts,
    TokenizerTrainingOptions,
    load_tokenizer,
    train_tokenizer,
)
from lightning_megatron.errors import DataError
from tests.unit.data.sentence_corpus import SPECIAL

TEXT = "the cat sat on the mat; the dog sat on the log. " * 20


def _train(folder: Path, vocab_size: int = 300, **options: Any) -> Any:
    (folder / "corpus.txt").write_text(TEXT)
    defaults = {"input": [folder / "corpus.txt"], "vocab_size": vocab_size, "output": folder / "tokenizer"}
    return train_tokenizer(TokenizerTrainingOptions(**(defaults | options)))


def test_every_text_survives_a_round_trip(tmp_path: Path) -> None:
    result = _train(tmp_path, 5000)  # more than there are pairs to merge
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

    assert (tokenizer.eos_token, result.documents, result.bytes) == (END_OF_TEXT, 1, len(TEXT))
    for text in (TEXT, "ünïcödé 漢字 🙂\r\n\t  end ", "\x01\x7f", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert max(ids, default=0) < result.vocab_size < 5000


def test_compressed_files_and_tables_are_read_and_bad_lines_skipped(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["zebra " * 9] * 5}), tmp_path / "x.parquet")
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(b'{"body": "zebra"}\n{bad\n'))
    inputs = [tmp_path / "x.parquet", tmp_path / "y.jsonl.gz"]

    with pytest.raises(DataError, match=r"y\.jsonl\.gz, line 2 is not JSON"):
        _train(tmp_path, 262, input=inputs, json_key="body")
    result = _train(tmp_path, 262, input=inputs, json_key="body", on_error="skip")

    assert (result.documents, result.skipped) == (6, 1)
    assert len(load_tokenizer(tmp_path / "tokenizer").encode(" zebra", add_special_tokens=False)) == 1


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokenizer folder .*absent does not exist; train one with train-tokenizer"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").write_text("x")
    with pytest.raises(DataError, match="other holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}'),
    ],
)
def test_whatever_is_wrong_with_a_tokenizer_is_told_and_nothing_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    _train(tmp_path)
    (tmp_path / "tokenizer" / name).write_text(content)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks on the terminal"))
    with pytest.raises(DataError, match="tokenizer holds no tokenizer that transformers can load"):
        load_tokenizer(tmp_path / "tokenizer")
    assert "Do you wish" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_special_tokens_of_a_kind_come_first_and_are_what_its_samples_need(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "a.txt").write_text("all the words that there are, and the words again " * 20)
    options = TokenizerTrainingOptions(input=[tmp_path / "a.txt"], vocab_size=400, output=tmp_path / "tok", kind=kind)

    train_tokenizer(options)

    facts = TokenizerFacts.read(tmp_path / "tok")
    if kind == "bert":
        assert facts.require(("pad", "cls", "sep", "mask"), "BERT") == (0, 1, 2, 3)
    else:
        assert facts.require(("pad", "eos"), "T5") == (0, 1)
        assert facts.sentinels == tuple(range(2, 102))
    text = "the words, again <mask> \n"
    tokenizer = load_tokenizer(tmp_path / "tok")
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- special tokens and words ---------------------------------------------------------------------------------------

WORDS = "Unaffable cats don't sit, unlike cuttable unaffable tables; 12 cats sit."


def _word_piece() -> Any:
    from transformers import BertTokenizer

    letters = sorted({letter for letter in WORDS.lower() if letter != " "})
    pieces = [*SPECIAL[:5], *letters, *(f"##{letter}" for letter in letters), "cat", "##able", "##tt"]
    return BertTokenizer(vocab={piece: token for token, piece in enumerate(pieces)})


def _unigram() -> Any:
    from transformers import T5Tokenizer

    letters = sorted(set(WORDS) - {" "})
    pieces = ["\u2581", *letters, "\u2581c", "able", "\u2581un", "\u2581sit", "\u2581\u6771", "\u4eac"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -float(len(piece))) for piece in pieces)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=100)


def _byte_level() -> Any:
    from tokenizers import pre_tokenizers
    from transformers import RobertaTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *alphabet, "at", "\u0120c", "\u0120cat"]
    merges = [("a", "t"), ("\u0120", "c"), ("\u0120c", "at")]
    return RobertaTokenizer(vocab={piece: token for token, piece in enumerate(pieces)}, merges=merges)


def _words(tokenizer: Any, text: str) -> list[str]:
    """The text cut where the facts say that words begin."""
    facts = TokenizerFacts.of(tokenizer, "test")
    words: list[list[int]] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if facts.begins_word[token] or not words:
            words.append([])
        words[-1].append(token)
    return [tokenizer.decode(word, clean_up_tokenization_spaces=False).strip() for word in words]


def test_words_of_word_pieces_are_those_of_its_own_splitter() -> None:
    tokenizer = _word_piece()
    numbers = tokenizer(WORDS, add_special_tokens=False).word_ids()

    facts = TokenizerFacts.of(tokenizer, "test")

    tokens = tokenizer.encode(WORDS, add_special_tokens=False)
    changes = [True, *(now != before for before, now in zip(numbers, numbers[1:], strict=False))]
    assert facts.begins_word[tokens].tolist() == changes
    assert changes.count(False) > 10


@pytest.mark.parametrize("make", [_unigram, _byte_level])
def test_words_of_marked_pieces_are_what_stands_between_spaces(make: Any) -> None:
    assert _words(make(), WORDS) == WORDS.split()


def test_special_tokens_and_sentinels_are_found_wherever_they_are() -> None:
    bert = TokenizerFacts.of(_word_piece(), "test")
    assert (bert.pad, bert.cls, bert.sep, bert.mask, bert.bos, bert.eos) == (0, 2, 3, 4, None, None)
    assert bert.sentinels == ()
    assert np.array_equal(bert.ids, np.arange(bert.size))

    unigram = _unigram()
    t5 = TokenizerFacts.of(unigram, "test")
    assert (t5.pad, t5.eos, t5.cls) == (0, 1, None)
    assert t5.sentinels == tuple(unigram.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(100)]))

    roberta = TokenizerFacts.of(_byte_level(), "test")
    assert (roberta.cls, roberta.pad, roberta.sep, roberta.eos, roberta.mask) == (0, 1, 2, 2, 4)
