"""Prompts as they were typed, written into a file or piped; texts as they are shown, whole and in any encoding."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.cli.generate import TextPrinter, TextStream, read_prompts
from lightning_megatron.generate.options import GenerationOptions
from tests.ranks import ROOT


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("aé🎉b".encode(), (), ["pa", "é", "🎉", "b", "\n"]),
        (b"a\xf0\x9f", (), ["pa", "\N{REPLACEMENT CHARACTER}\n"]),
        (b"ab.\n\ncd", ("x", ".\n"), ["pa", "b", ".", "\n", "\n"]),
    ],
)
def test_a_stream_shows_whole_characters_and_nothing_behind_a_stop_text(
    text: bytes, stop: tuple[str, ...], pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    stream = TextStream("p", list(b"p"), Bytes(), GenerationOptions(stop_strings=stop))
    monkeypatch.setattr(sys.stdout, "write", written.append)
    for token in (*text, -1):
        stream.add(torch.tensor([token]))
    stream.end({}, None)
    assert [piece for piece in written if piece] == pieces


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_characters_that_the_output_lacks_are_escaped_for_programs(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    TextPrinter([], Bytes(), GenerationOptions(), as_json=True, is_answer=False).show("é ", "🎉")
    sys.stdout.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == {"prompt": "é ", "text": "🎉"}


# ---- prompts ---------------------------------------------------------------------------------------------------------

LINES = "\ufeffé 日本\r\n\r\n second line \n\n".encode()
_READERS = """
import os, subprocess, sys
from pathlib import Path
from lightning_megatron.cli.generate import read_prompts
read = lambda: print(ascii(read_prompts(None, Path("-"), 2)), flush=True)
read()
if sys.argv[1:]:
    os.environ["LOCAL_RANK"] = "1"
    subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_lines_with_text_are_prompts_whatever_ends_them(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(LINES)
    assert read_prompts(None, tmp_path / "prompts.txt", 2) == ["é 日本", " second line "]
    assert read_prompts(["a", ""], None, 1) == ["a", ""]


def test_processes_that_are_started_read_what_the_first_one_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    command = [sys.executable, "-c", _READERS, _READERS]
    done = subprocess.run(command, input=LINES, capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.decode().splitlines() == [ascii(["é 日本", " second line "])] * 2
    monkeypatch.setenv("LOCAL_RANK", "0")  # of another launcher, whose processes share one pipe
    refused = subprocess.run(command[:3], input=LINES, capture_output=True, cwd=ROOT)
    assert b"--prompt-file - is read by one process, got 2" in refused.stderr
