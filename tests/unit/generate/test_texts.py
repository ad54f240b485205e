"""Special tokens of models and texts that end rows, beside transformers' rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.texts import EndTokens, end_tokens, stop_strings
from tests.generate.readable import byte_level_tokenizer

_CONFIG: dict[str, Any] = {"model_type": "t5", "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 3}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, EndTokens(eos=(1,), pad=0)),
        ({"eos_token_id": [5, 6], "pad_token_id": 7}, EndTokens(eos=(5, 6), pad=7)),
        ({"decoder_start_token_id": 8, "bos_token_id": 9}, EndTokens(start=8)),
        ({"eos_token_id": 5, "bos_token_id": 9}, EndTokens(eos=(5,), start=9)),
    ],
)
def test_the_generation_config_comes_before_the_config(tmp_path: Path, generation: Any, expected: EndTokens) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(tmp_path) == expected


@pytest.mark.parametrize(("text", "says"), [("{", "cannot be read as JSON"), ("[]", "holds a list, not an object")])
def test_a_generation_config_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        end_tokens(tmp_path)


@pytest.mark.parametrize("tokenizer", [3, "no/such/folder"])
def test_what_is_no_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no/such/folder|stop_strings: expected a tokenizer .* got 3"):
        stop_strings(["a"], tokenizer)


def test_a_tokenizer_may_be_a_folder_and_must_know_the_letters(tmp_path: Path) -> None:
    byte_level_tokenizer({0: b"a", 1: b"b"}).save_pretrained(tmp_path)
    stops = stop_strings(["ab"], tmp_path)
    assert stops(torch.tensor([[0, 1], [1, 0]]), None).tolist() == [True, False]
    assert stop_strings(["ab"], tmp_path) is stops
    assert stop_strings(["ba"], tmp_path)(torch.tensor([[0, 1], [1, 0]]), None).tolist() == [False, True]
    with pytest.raises(ConfigError, match=r"stop_strings=\('x',\) can be written with no token"):
        stop_strings(["x"], str(tmp_path))
