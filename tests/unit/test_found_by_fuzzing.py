"""Regression tests for bugs found by the fuzzing campaign (tests/campaigns/fuzzed.py)."""

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.convert.companions import copy_companions
from lightning_megatron.convert.convert import build_on_cpu
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError


def test_link_to_a_parent_directory_is_not_copied(tmp_path: Path) -> None:
    model = tmp_path / "model"
    new = tmp_path / "new"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    (model / "additional_chat_templates" / "up").symlink_to("../..")
    (model / "tokenizer_config.json").symlink_to("..")
    os.mkfifo(model / "tokenizer.json")
    (model / "vocab.json").write_text("{}")
    copy_companions(sorted(model.iterdir()), new)
    copied = sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file())
    assert copied == ["additional_chat_templates/tool.jinja", "vocab.json"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "../../etc/passwd"}, "the gpt2 config is invalid: .*; correct it"),
        (
            {"n_head": 2**62},
            "does not divide hidden_size=768; choose num_attention_heads from 1, 2, 3, 4, 6, 8",
        ),
        ({"n_head": 2**30 + 1, "n_embd": 2**40}, "does not divide hidden_size"),
        (
            {"model_type": "falcon", "num_attention_heads": 3, "hidden_size": 32},
            "=3 does not divide hidden_size=32",
        ),
        (
            {"initializer_range": float("nan")},
            "init_method_std=nan: expected a finite number, at least 0",
        ),
        ({"n_inner": 2**40}, r"take [\d,]+ GiB on 1 rank of this host, which has \d+ GiB"),
    ],
)
def test_invalid_config_is_refused_before_building(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_on_cpu(model_config({"model_type": "gpt2", **fields}), ParallelConfig())
