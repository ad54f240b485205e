"""What of a text counts where only its last token does, and what cannot be asked; test_text_evaluation.py has more."""

import json
from pathlib import Path

import pytest

from lightning_megatron.data.evaluation import EvaluationTexts, read_evaluation_texts
from lightning_megatron.errors import DataError
from tests.tokenizers import make_tokenizer


def _texts(folder: Path, *lines: str, strict: bool = True) -> EvaluationTexts:
    """By a tokenizer that puts ``<s>`` before texts."""
    (folder / "texts.jsonl").write_text("\n".join(lines))
    tokenizer = make_tokenizer(folder / "tok", bos=True)
    return read_evaluation_texts(str(folder / "texts.jsonl"), tokenizer, 8, "last_word", 8, strict, "text")


def test_a_last_token_is_asked_behind_the_end_of_its_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "the question was: is it? \n is it yes?\n"
    texts = _texts(tmp_path, json.dumps({"text": text}), strict=False)
    whole = AutoTokenizer.from_pretrained(tmp_path / "tok").encode(text.strip())
    assert (texts.tokens.tolist(), texts.num_truncated) == (whole, 1)
    assert texts.bounds.tolist() == [[len(whole) - 9, len(whole) - 1, len(whole)]]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "one"}', "line 2: expected at least two words, to predict the last, got 1"),
        ('{"content": "a b"}', "line 2 has no key 'text'; choose the json key from content"),
        ('{"text": "a bcdefghijklmn"}', "line 2 ends with a word of 14 tokens, seq_length=8"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        _texts(tmp_path, '{"text": "it is"}', line)
