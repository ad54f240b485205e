"""Instructions are tokenized once, and again when anything that matters has changed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.data import instructions as instruction_cache
from lightning_megatron.data.instructions import (
    InstructionOptions,
    Instructions,
    InstructionSamples,
    RowOptions,
    cached_instructions,
    read_instructions,
)
from lightning_megatron.errors import DataError
from tests.unit.data.chat_tokenizer import MARKED, UNMARKED, make_tokenizer


class _Counted:
    """Counts how often instructions are tokenized."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, options: InstructionOptions) -> Instructions:
        self.count += 1
        return read_instructions(options)


@pytest.fixture
def options(tmp_path: Path) -> InstructionOptions:
    turns = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "yes"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    return InstructionOptions(path=str(path), tokenizer=tokenizer, seq_length=64)


def test_tokens_are_kept_until_something_changes(
    tmp_path: Path, options: InstructionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = _Counted()
    monkeypatch.setattr(instruction_cache, "read_instructions", reads)
    cache = str(tmp_path / "cache")

    def rows(changed: InstructionOptions) -> object:
        samples = InstructionSamples(cached_instructions(changed, cache), RowOptions())
        return {name: tensor.tolist() for name, tensor in samples.rows([0]).items()}, samples.fingerprint

    first = rows(options)
    fresh = InstructionSamples(read_instructions(options), RowOptions())
    assert first == rows(options)
    assert first == ({name: tensor.tolist() for name, tensor in fresh.rows([0]).items()}, fresh.fingerprint)
    assert reads.count == 1
    changes = [replace(options, seq_length=32), replace(options, answers="last"), replace(options, separator=" ")]
    for number, changed in enumerate(changes, 2):
        rows(changed)
        assert reads.count == number
    make_tokenizer(Path(options.tokenizer), MARKED)
    assert rows(options) != first
    os.utime(options.path, ns=(1, 1))
    rows(options)
    assert reads.count == 6


def test_without_a_folder_nothing_is_written(tmp_path: Path, options: InstructionOptions) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cached_instructions(options, None).fingerprint == read_instructions(options).fingerprint
    assert sorted(tmp_path.rglob("*")) == before


def test_errors_leave_nothing_behind(tmp_path: Path, options: InstructionOptions) -> None:
    Path(options.path).write_text("{}\n")
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="line 1 has the keys none"):
        cached_instructions(options, str(cache))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to .*; set index_cache to a folder"):
        cached_instructions(options, str(tmp_path / "file"))
