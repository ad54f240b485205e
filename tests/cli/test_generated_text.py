"""Are texts shown as they are: whole characters while they grow, behind their prompts, in any encoding?"""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
import torch

from lightning_megatron.cli.generated_text import Continued, TextPrinter, TextStream, show_what_can_be_shown


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


def test_a_stream_shows_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _streamed("aé🎉b".encode(), [], monkeypatch) == ["p", "a", "é", "🎉", "b", "\n"]


def test_a_stream_ends_with_half_a_character_if_the_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _streamed(b"a\xf0\x9f", [], monkeypatch) == ["p", "a", "\N{REPLACEMENT CHARACTER}", "\n"]


def test_a_stream_shows_nothing_behind_a_stop_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(_streamed(b"ab.\n\ncd", ["x", ".\n"], monkeypatch)) == "pab.\n\n"


def test_texts_are_shown_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Written()
    monkeypatch.setattr(sys, "stdout", out)
    printer = TextPrinter(as_json=False, between="\n")
    printer.show([Continued(prompt="a", text="b")])
    assert out.getvalue() == "a\nb"
    printer.show([Continued(prompt="c", text="d"), Continued(prompt="e", text="f")])
    printer.end()
    assert out.getvalue() == "a\nb\n\nc\nd\n\ne\nf\n"


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "é ?\n"), ("utf-8", "é 🎉\n")])
def test_characters_that_the_output_lacks_do_not_end_the_run(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for as_json in (False, True):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        show_what_can_be_shown()
        printer = TextPrinter(as_json=as_json)
        printer.show([Continued(prompt="é ", text="🎉")])
        printer.end()
        sys.stdout.flush()
        text = raw.getvalue().decode(encoding)
        assert json.loads(text) == {"prompt": "é ", "text": "🎉"} if as_json else text == shown
