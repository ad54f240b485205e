"""Tokenizers that would multiply a text, or end the library in a panic, are refused in one line."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data.tokenizer import batch_encoder, load_tokenizer
from lightning_megatron.data.tokenizer_files import check_growth
from lightning_megatron.errors import DataError

_MODEL = {
    "type": "BPE",
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": ["a b"],
}


def _tokenizer(folder: Path, **parts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"version": "1.0", "added_tokens": [], "model": _MODEL, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder


def _replace(
    pattern: str,
    content: str,
    kind: str = "String",
) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def _charsmap(text: bytes) -> dict[str, Any]:
    content = (4).to_bytes(4, "little") + bytes(4) + b"x\0" + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


_A = {"Sequence": {"id": "A", "type_id": 0}}
_TEMPLATE = {"type": "TemplateProcessing", "pair": [_A], "special_tokens": {}}
MULTIPLYING: dict[str, dict[str, Any]] = {
    "doubled thirty times": {"normalizer": _sequence(*[_replace(" ", "  ")] * 30)},
    "nested": {"normalizer": _sequence(*[_sequence(*[_replace("a", "aa")] * 6)] * 5)},
    "by way of another letter": {
        "normalizer": _sequence(*[_replace("a", "bbbb"), _replace("b", "aa")] * 5)
    },
    "long content": {"normalizer": _replace("a", "b" * 2000)},
    "between all letters": {"normalizer": _sequence(*[_replace("(?=.)", "x", "Regex")] * 20)},
    "by an expression": {"normalizer": _sequence(*[_replace("[a-z]", "xxxx", "Regex")] * 20)},
    "by compatibility": {"normalizer": _sequence(*[_replace(" ", "\ufdfa"), {"type": "NFKC"}] * 8)},
    "by a table": {"normalizer": _charsmap(b"x" * 5000)},
    "when it is decoded": {"decoder": {"type": "Sequence", "decoders": [_replace("a", "aa")] * 30}},
    "by copies": {"post_processor": {**_TEMPLATE, "single": [_A] * 2000}},
    "by copies of copies": {
        "post_processor": {
            "type": "Sequence",
            "processors": [{**_TEMPLATE, "single": [_A] * 9}] * 9,
        }
    },
}
USUAL: dict[str, dict[str, Any]] = {
    "albert": {
        "normalizer": _sequence(
            _replace("``", '"'),
            _replace("''", '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            _charsmap(b"x" * 33),
            _replace(" {2,}", " ", "Regex"),
        )
    },
    "llama": {
        "normalizer": _sequence({"type": "Prepend", "prepend": "\u2581"}, _replace(" ", "\u2581"))
    },
    "fifty signs by names": {
        "normalizer": _sequence(*[_replace(chr(0x1F600 + n), ":a smile:") for n in range(50)])
    },
    "fifty expressions": {
        "normalizer": _sequence(*[_replace("[\u201c\u201d]+", '"', "Regex")] * 50)
    },
    "none": {"normalizer": None},
}


@pytest.mark.parametrize("name", MULTIPLYING)
def test_tokenizer_that_multiplies_texts_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="expected a tokenizer that makes texts at most 1000 times as long"
    ):
        load_tokenizer(_tokenizer(tmp_path, **MULTIPLYING[name]))


@pytest.mark.parametrize("name", USUAL)
def test_usual_tokenizers_multiply_nothing(name: str, tmp_path: Path) -> None:
    check_growth(_tokenizer(tmp_path, **USUAL[name]))


PANICS: dict[str, dict[str, Any]] = {
    "table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "table that points outside": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}
    },
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "prefix longer than a piece": {
        "model": {**_MODEL, "continuing_subword_prefix": "\u20ac\u20ac\u20ac"}
    },
}


@pytest.mark.parametrize("name", PANICS)
def test_panic_of_the_library_is_one_error(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as error:
        load_tokenizer(_tokenizer(tmp_path, **PANICS[name]))
    assert "\n" not in str(error.value)
    assert "panicked" not in capfd.readouterr().err


def test_panic_on_a_later_text_is_one_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_tokenizer(tmp_path))
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(
        DataError, match="the tokenizers library failed .chunk size must be non-zero"
    ):
        batch_encoder(tokenizer)(["a b"])
