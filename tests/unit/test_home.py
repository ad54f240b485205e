"""``~`` in the paths of a YAML file, which no shell has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_megatron import CheckpointError, MegatronModule
from lightning_megatron.checkpoint.files import find_newest
from lightning_megatron.cli.train import _check_checkpoint_exists
from lightning_megatron.data.tokenizer import load_tokenizer
from tests.unit.data.chat_tokenizer import make_tokenizer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_model_and_its_tokenizer_are_found_at_home(home: Path) -> None:
    make_tokenizer(home / "model")
    (home / "model/config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 311}))
    assert MegatronModule(model="~/model").model_config.vocab_size == 311
    assert load_tokenizer("~/model").encode("yes")


def test_checkpoints_are_looked_for_at_home(home: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{home}/a.ckpt"):
        find_newest(Path("~/a.ckpt"))
    (home / "a.ckpt").mkdir()
    _check_checkpoint_exists("~/a.ckpt")  # raises if it is missed
