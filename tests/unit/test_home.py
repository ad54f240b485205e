"""``~`` in the paths of a YAML file, which no shell has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron import CheckpointError, MegatronModule
from lightning_megatron.checkpoint.files import find_newest
from lightning_megatron.data.tokenizer import load_tokenizer
from tests.unit.data.chat_tokenizer import make_tokenizer


def test_models_tokenizers_and_checkpoints_are_found_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 311}))
    assert MegatronModule(model="~/model").model_config.vocab_size == 311
    assert load_tokenizer("~/model").encode("yes")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/a.ckpt"):
        find_newest(Path("~/a.ckpt"))
