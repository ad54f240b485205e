"""A last word is what stands behind the last space, mistakes are named; test_text_evaluation.py has the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron import TextEvaluationDataModule
from lightning_megatron.data.evaluation import EvaluationTexts, read_evaluation_texts
from lightning_megatron.errors import ConfigError, DataError
from tests.unit.data.chat_tokenizer import make_tokenizer

TEXTS = ["the answer is yes", "the question was: is it? \n is it yes?\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``tok``, which puts ``<s>`` before texts."""
    folder = tmp_path_factory.mktemp("evaluation")
    make_tokenizer(folder / "tok", bos=True)
    return folder


def _texts(folder: Path, lines: list[str], seq_length: int, strict: bool = True) -> EvaluationTexts:
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return read_evaluation_texts(
        str(folder / "texts.jsonl"), str(folder / "tok"), seq_length, "last_word", seq_length, strict, "text"
    )


@pytest.mark.parametrize("strict", [True, False])
def test_a_last_word_is_tokenized_with_its_space_and_a_long_text_loses_its_beginning(
    folder: Path, strict: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tok")
    texts = _texts(folder, [json.dumps({"text": text}) for text in TEXTS], 8, strict)
    words = [" yes", " yes?" if strict else "?"]
    assert [tokenizer.decode(texts.tokens[first:end]) for _, first, end in texts.bounds.tolist()] == words
    whole = [tokenizer.encode(text.strip()) for text in TEXTS]
    assert texts.tokens[: texts.bounds[0, 2]].tolist() == whole[0]
    assert texts.tokens[texts.bounds[1, 0] :].tolist() == whole[1][-9:]
    assert texts.num_cut == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "one"}', "line 2 has 1 words, a last word is predicted from those before it"),
        ('{"content": "a b"}', "line 2 has no key 'text'; choose the json key from content"),
        ('{"text": "a bcdefghijk"}', "line 2 ends with a word of 11 tokens, seq_length=5"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(folder: Path, line: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        _texts(folder, ['{"text": "it is"}', line], 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"stride": 0}, "and 1 to seq_length=8"), ({"stride": 4, "task": "last_word"}, "stride=4 is for task=perplexity")],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TextEvaluationDataModule("texts", "tok", seq_length=8, **options)
