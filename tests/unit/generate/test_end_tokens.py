"""Are the tokens that start, end and pad texts those that Hugging Face's generate takes?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.end_tokens import EndTokens, end_tokens

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


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "holds a list, not an object")])
def test_a_generation_config_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        end_tokens(tmp_path)
