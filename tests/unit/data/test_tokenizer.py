"""Tokenizers: lossless training, special tokens, word starts; broken directories are refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from lightning_megatron.data.tokenizer_facts import TokenizerFacts
from lightning_megatron.data.tokenizer_training import (
    END_OF_TEXT,
    TokenizerTrainingOptions,
    train_tokenizer,
)
from lightning_megatron.errors import DataError
from tests.unit.data.sentence_corpus import SPECIAL

TEXT = "the cat sat on the mat; the dog sat on the log. " * 20


def _train(
    folder: Path,
    vocab_size: int = 400,
    **options: Any,
) -> Any:
    (folder / "corpus.txt").write_text(TEXT)
    defaults: dict[str, Any] = {
        "input": [folder / "corpus.txt"],
        "vocab_size": vocab_size,
        "output": folder / "tokenizer",
    }
    return train_tokenizer(TokenizerTrainingOptions(**(defaults | options)))


@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_round_trip_is_lossless_and_special_tokens_come_first(tmp_path: Path, kind: str) -> None:
    result = _train(tmp_path, 5000, kind=kind)  # more than there are pairs to merge
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    facts = TokenizerFacts.of(tokenizer, "test")

    assert (result.documents, result.bytes) == (1, len(TEXT))
    for text in (TEXT, "ünïcödé 漢字 🙂\r\n\t  end ", "\x01\x7f <mask>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert max(ids, default=0) < result.vocab_size < 5000
    if kind == "gpt":
        assert tokenizer.eos_token == END_OF_TEXT
    elif kind == "bert":
        assert facts.require(("pad", "cls", "sep", "mask"), "BERT") == (0, 1, 2, 3)
    else:
        assert (*facts.require(("pad", "eos"), "T5"), *facts.sentinels) == tuple(range(102))


def _bpe(folder: Path, change: str) -> Any:
    """A byte-level BPE tokenizer of ``TEXT`` as loaded from its files, with one change; "" for none."""
    from tokenizers import normalizers

    _train(folder)
    tokenizer = load_tokenizer(folder / "tokenizer")
    backend = tokenizer.backend_tokenizer
    if change == "merges":
        file = folder / "tokenizer" / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"].reverse()
        file.write_text(json.dumps(content))
        tokenizer = load_tokenizer(folder / "tokenizer")
    elif change == "normalizer":
        backend.normalizer = normalizers.Lowercase()
    elif change == "eos":
        tokenizer.eos_token = "a"
    elif change == "words":
        tokenizer.add_tokens(["the cat"])
    elif change == "truncation":
        backend.enable_truncation(2)
    return tokenizer


def test_fingerprint_is_that_of_what_a_tokenizer_makes_of_texts(tmp_path: Path) -> None:
    fingerprints = {}
    for change in ("", "again", "merges", "normalizer", "eos", "words", "truncation"):
        folder = tmp_path / f"changed_{change}"
        folder.mkdir()
        fingerprints[change] = tokenizer_fingerprint(_bpe(folder, change))
    # A corpus is never truncated.
    assert fingerprints["again"] == fingerprints.pop("truncation") == fingerprints.pop("")
    assert len(set(fingerprints.values())) == len(fingerprints)


def test_invalid_lines_can_be_skipped_and_output_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "y.jsonl").write_text('{"body": "zebra"}\n{bad\n')
    options: dict[str, Any] = {"input": [tmp_path / "y.jsonl"], "json_key": "body"}
    with pytest.raises(DataError, match=r"y\.jsonl, line 2 is not JSON"):
        _train(tmp_path, 262, **options)
    result = _train(tmp_path, 262, **options, on_error="skip")
    assert (result.documents, result.skipped) == (1, 1)
    assert (
        len(load_tokenizer(tmp_path / "tokenizer").encode("zebra", add_special_tokens=False)) == 1
    )
    with pytest.raises(
        DataError, match=r"output=\S+ would overwrite \S+tokenizer.json; choose another"
    ):
        _train(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "../absent",
            "",
            "tokenizer directory .*tokenizer is missing; train one with train-tokenizer",
        ),
        ("readme.txt", "x", ""),
        ("tokenizer_config.json", '{"eos_token": 5}', ""),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}',
            "",
        ),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}', ""),
    ],
)
def test_broken_tokenizer_is_refused_without_a_prompt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    message: str,
) -> None:
    if name.endswith(".json"):
        _train(tmp_path)
    elif not message:
        (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / name).resolve().write_text(content)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks on the terminal"))
    with pytest.raises(
        DataError, match=message or "tokenizer holds no tokenizer that transformers can load"
    ):
        load_tokenizer(tmp_path / "tokenizer")


# ---- special tokens and words ---------------------------------------------------------------------------------------

WORDS = "Unaffable cats don't sit, unlike cuttable unaffable tables; 12 cats sit."


def _word_piece() -> Any:
    from transformers import BertTokenizer

    letters = sorted({letter for letter in WORDS.lower() if letter != " "})
    pieces = [
        *SPECIAL[:5],
        *letters,
        *(f"##{letter}" for letter in letters),
        "cat",
        "##able",
        "##tt",
    ]
    return BertTokenizer(vocab={piece: token for token, piece in enumerate(pieces)})


def _unigram() -> Any:
    from transformers import T5Tokenizer

    letters = sorted(set(WORDS) - {" "})
    pieces = [
        "\u2581",
        *letters,
        "\u2581c",
        "able",
        "\u2581un",
        "\u2581sit",
        "\u2581\u6771",
        "\u4eac",
    ]
    vocabulary = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *((piece, -float(len(piece))) for piece in pieces),
    ]
    return T5Tokenizer(vocab=vocabulary, extra_ids=100)


def _byte_level() -> Any:
    from tokenizers import pre_tokenizers
    from transformers import RobertaTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
        *alphabet,
        "at",
        "\u0120c",
        "\u0120cat",
    ]
    merges = [("a", "t"), ("\u0120", "c"), ("\u0120c", "at")]
    return RobertaTokenizer(
        vocab={piece: token for token, piece in enumerate(pieces)}, merges=merges
    )


def test_word_starts_of_word_pieces_equal_transformers() -> None:
    tokenizer = _word_piece()
    word_ids = tokenizer(WORDS, add_special_tokens=False).word_ids()
    tokens = tokenizer.encode(WORDS, add_special_tokens=False)
    starts = [True]
    starts += [now != before for before, now in itertools.pairwise(word_ids)]
    assert TokenizerFacts.of(tokenizer, "test").begins_word[tokens].tolist() == starts
    assert starts.count(False) > 10


@pytest.mark.parametrize("make", [_unigram, _byte_level])
def test_word_starts_of_unigram_and_byte_level_pieces_follow_spaces(make: Any) -> None:
    tokenizer = make()
    tokens = np.array(tokenizer.encode(WORDS, add_special_tokens=False))
    starts = TokenizerFacts.of(tokenizer, "test").begins_word[tokens]
    words = np.split(tokens, np.flatnonzero(starts[1:]) + 1)
    assert [
        tokenizer.decode(word, clean_up_tokenization_spaces=False).strip() for word in words
    ] == WORDS.split()


def test_special_tokens_and_sentinels_are_found_at_any_id() -> None:
    bert = TokenizerFacts.of(_word_piece(), "test")
    assert (bert.special, bert.sentinels) == ({"pad": 0, "cls": 2, "sep": 3, "mask": 4}, ())
    assert np.array_equal(bert.ids, np.arange(bert.size))

    unigram = _unigram()
    t5 = TokenizerFacts.of(unigram, "test")
    assert t5.special == {"pad": 0, "eos": 1}
    assert t5.sentinels == tuple(
        unigram.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(100)])
    )

    roberta = TokenizerFacts.of(_byte_level(), "test")
    assert roberta.special == {"cls": 0, "pad": 1, "sep": 2, "bos": 0, "eos": 2, "mask": 4}
