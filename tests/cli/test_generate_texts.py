"""Prompts as they were typed, written into a file or piped; texts as they are shown, whole and in any encoding."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.cli.generate import TextPrinter, TextStream, read_prompts, show_what_can_be_shown
from lightning_megatron.errors import ConfigError


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


class Written(io.StringIO):
    """Remembers each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def _streamed(text: bytes, stop: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    out = Written()
    monkeypatch.setattr(sys, "stdout", out)
    stream = TextStream(Bytes(), "p", list(b"p"), stop)
    stream.begin()
    for token in text:
        stream.add(torch.tensor([token]))
    stream.add(torch.tensor([-1]))
    stream.end()
    return out.pieces


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("aé🎉b".encode(), [], ["p", "a", "é", "🎉", "b", "\n"]),
        (b"a\xf0\x9f", [], ["p", "a", "\N{REPLACEMENT CHARACTER}", "\n"]),
        (b"ab.\n\ncd", ["x", ".\n"], ["p", "a", "b", ".", "\n", "\n"]),
    ],
)
def test_a_stream_shows_whole_characters_and_nothing_behind_a_stop_text(
    text: bytes, stop: list[str], pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _streamed(text, stop, monkeypatch) == pieces


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "é ?\n"), ("utf-8", "é 🎉\n")])
def test_characters_that_the_output_lacks_do_not_end_the_run(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for as_json in (False, True):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        show_what_can_be_shown()
        printer = TextPrinter(Bytes(), (), as_json=as_json, is_answer=False)
        printer.show([("é ", "🎉")])
        printer.end()
        sys.stdout.flush()
        text = raw.getvalue().decode(encoding)
        assert json.loads(text) == {"prompt": "é ", "text": "🎉"} if as_json else text == shown


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printed(texts: list[tuple[str, str]], out: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> str:
    monkeypatch.setattr("sys.stdout", out)
    printer = TextPrinter(Bytes(), (), as_json=as_json, is_answer=False)
    printer.show(texts)
    printer.end()
    return out.getvalue()


def test_a_terminal_tells_prompt_and_text_apart_and_a_file_has_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    texts = [("one", " two"), ("three", " \u00e9\n")]
    assert _printed(texts[:1], _Terminal(), monkeypatch, as_json=False) == "\033[1mone\033[0m two\n"
    assert _printed(texts, io.StringIO(), monkeypatch, as_json=False) == "one two\n\nthree \u00e9\n\n"
    assert _printed(texts, io.StringIO(), monkeypatch, as_json=True).splitlines() == [
        '{"prompt": "one", "text": " two"}',
        '{"prompt": "three", "text": " \u00e9\\n"}',
    ]


# ---- prompts ---------------------------------------------------------------------------------------------------------

LINES = "\ufeffé 日本\r\n\r\n second line \n\n".encode()


@pytest.fixture
def _standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LIGHTNING_MEGATRON_PROMPTS"):
        monkeypatch.setenv(name, "so that what the test sets is undone")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))


@pytest.mark.usefixtures("_standard_input")
def test_lines_with_text_are_prompts_whatever_ends_them(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(LINES)
    assert read_prompts(None, tmp_path / "prompts.txt", 2) == ["é 日本", " second line "]
    assert read_prompts(None, Path("-"), 1) == ["é 日本", " second line "]
    assert "LIGHTNING_MEGATRON_PROMPTS" not in os.environ  # there is nobody to leave a copy to
    assert read_prompts(["a", ""], None, 1) == ["a", ""]


@pytest.mark.usefixtures("_standard_input")
def test_processes_that_are_started_read_what_the_first_one_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = read_prompts(None, Path("-"), 2)
    assert prompts == ["é 日本", " second line "]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_prompts(None, Path("-"), 2) == prompts
    copy = Path(os.environ["LIGHTNING_MEGATRON_PROMPTS"])
    assert copy.stat().st_mode & 0o077 == 0  # nobody else's business
    copy.unlink()


@pytest.mark.usefixtures("_standard_input")
def test_processes_of_another_launcher_cannot_share_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="--prompt-file - is read by one process, and 2 were started already"):
        read_prompts(None, Path("-"), 2)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--prompt 'a\\udcff' is not UTF-8"):
        read_prompts([b"a\xff".decode(errors="surrogateescape")], None, 1)
