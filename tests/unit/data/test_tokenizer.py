"""The trained tokenizer is lossless and loads in transformers; what is wrong with one is told."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lightning_megatron.data.tokenizer import (
    END_OF_TEXT,
    TokenizerTrainingOptions,
    load_tokenizer,
    train_tokenizer,
)
from lightning_megatron.errors import ConfigError, DataError

TEXT = "the cat sat on the mat; the dog sat on the log. " * 20


def _train(folder: Path, vocab_size: int = 300, **options: Any) -> Any:
    (folder / "corpus.txt").write_text(TEXT)
    defaults = {"input": [folder / "corpus.txt"], "vocab_size": vocab_size, "output": folder / "tokenizer"}
    return train_tokenizer(TokenizerTrainingOptions(**(defaults | options)))


def test_transformers_loads_it_with_the_asked_size_and_the_end_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    result = _train(tmp_path, 270)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    assert len(tokenizer) == result.vocab_size == 270
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == END_OF_TEXT
    assert (result.documents, result.bytes) == (1, len(TEXT))


def test_every_text_survives_a_round_trip(tmp_path: Path) -> None:
    result = _train(tmp_path, 5000)  # more than there are pairs to merge
    tokenizer = load_tokenizer(tmp_path / "tokenizer")

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


def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for size, kind, message in (
        (256, "gpt", "vocab_size=256 must be from 257, which 256 bytes and .* need, to 16777216"),
        (300, "t5", "vocab_size=300 must be from 358, .* kind='t5' need"),
    ):
        with pytest.raises(ConfigError, match=message):
            _train(tmp_path, size, kind=kind)


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
    from lightning_megatron.data.special_tokens import TokenizerFacts

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
