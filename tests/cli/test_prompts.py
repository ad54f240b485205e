"""Are the prompts those that were typed, written into a file, or piped, in every process?"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from lightning_megatron.cli.prompts import read_prompts
from lightning_megatron.errors import ConfigError

LINES = "\ufeffé 日本\r\n\r\n second line \n\n".encode()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LIGHTNING_MEGATRON_PROMPTS"):
        monkeypatch.setenv(name, "so that what the test sets is undone")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))


def test_lines_with_text_are_prompts_whatever_ends_them(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(LINES)
    assert read_prompts(None, tmp_path / "prompts.txt", 2) == ["é 日本", " second line "]
    assert read_prompts(["a", ""], None, 1) == ["a", ""]


def test_processes_that_are_started_read_what_the_first_one_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = read_prompts(None, Path("-"), 2)
    assert prompts == ["é 日本", " second line "]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_prompts(None, Path("-"), 2) == prompts
    copy = Path(os.environ["LIGHTNING_MEGATRON_PROMPTS"])
    assert copy.stat().st_mode & 0o077 == 0  # nobody else's business
    copy.unlink()


def test_one_process_leaves_no_copy() -> None:
    assert read_prompts(None, Path("-"), 1) == ["é 日本", " second line "]
    assert "LIGHTNING_MEGATRON_PROMPTS" not in os.environ


def test_processes_of_another_launcher_cannot_share_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="--prompt-file - is read by one process, and 2 were started already"):
        read_prompts(None, Path("-"), 2)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--prompt 'a\\udcff' is not UTF-8"):
        read_prompts([b"a\xff".decode(errors="surrogateescape")], None, 1)
