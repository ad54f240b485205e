"""Evaluation texts for last-word accuracy: token bounds and invalid lines; see also test_text_evaluation.py."""

import json
from pathlib import Path

import pytest

from lightning_megatron.data.documents import read_texts
from lightning_megatron.data.evaluation import EvaluationTexts, tokenize_evaluation_texts
from lightning_megatron.errors import DataError
from tests.tokenizers import make_tokenizer


def _read(
    folder: Path,
    *lines: str,
    strict: bool = True,
) -> EvaluationTexts:
    """Tokenize JSON lines with a tokenizer that prepends ``<s>``."""
    (folder / "texts.jsonl").write_text("\n".join(lines))
    tokenizer = make_tokenizer(folder / "tok", bos=True)
    path = str(folder / "texts.jsonl")
    return tokenize_evaluation_texts(path, read_texts(path), tokenizer, 8, "last_word", 8, strict)


def test_only_the_last_word_of_a_truncated_text_counts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "the question was: is it? \n is it yes?\n"
    texts = _read(
        tmp_path,
        json.dumps({"text": text}),
        strict=False,
    )
    tokens = AutoTokenizer.from_pretrained(tmp_path / "tok").encode(text.strip())
    assert (texts.tokens.tolist(), texts.num_truncated) == (tokens, 1)
    assert texts.bounds.tolist() == [[len(tokens) - 9, len(tokens) - 1, len(tokens)]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "one"}', "line 2: expected at least two words, to predict the last, got 1"),
        ('{"text": "a bcdefghijklmn"}', "line 2 ends with a word of 14 tokens, seq_length=8"),
    ],
)
def test_invalid_line_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _read(tmp_path, '{"text": "it is"}', line)
