"""Is a text that is shown while it grows whole characters at any time, and the same as at once?"""

from __future__ import annotations

import io

import pytest
import torch

from lightning_megatron.cli.generated_text import Continued, TextStream, cut, printed


class _Bytes:
    """A tokenizer whose tokens are bytes; 0 is special."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token > 0).decode("utf-8", errors="replace")


class _Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.shown.append(text)
        return super().write(text)


def _streamed(text: bytes, monkeypatch: pytest.MonkeyPatch, *, stop: tuple[str, ...] = ()) -> list[str]:
    """What is written token by token, the prompt first."""
    out = _Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = TextStream(_Bytes(), "a \N{SNOWMAN}", list("a \N{SNOWMAN}".encode()), stop)
    stream.begin()
    for token in (*text, 0, -1, -1):
        stream.add(torch.tensor([token]))
    stream.end()
    return out.shown


def test_a_character_is_shown_when_its_last_byte_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _streamed("x\u00e9\u65e5!".encode(), monkeypatch)
    assert shown == ["a \N{SNOWMAN}", "x", "\u00e9", "\u65e5", "!", "\n"]


def test_what_never_becomes_a_character_is_shown_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _streamed("x\u65e5".encode()[:-1], monkeypatch)[1:] == ["x", "\N{REPLACEMENT CHARACTER}", "\n"]
    # In the middle it is settled by what follows.
    assert "".join(_streamed(b"x\xe6y", monkeypatch)) == "a \N{SNOWMAN}x\N{REPLACEMENT CHARACTER}y\n"


def test_nothing_is_shown_behind_a_stop_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(_streamed(b"one. two. three", monkeypatch, stop=(". t", "three"))[1:]) == "one. t\n"


@pytest.mark.parametrize(
    ("text", "stop", "expected"), [("a;b|c", ("|", ";"), "a;"), ("abc", (), "abc"), ("abc", ("d",), "abc")]
)
def test_a_text_is_cut_behind_the_first_stop_text(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert cut(text, stop) == expected


def test_a_terminal_tells_prompt_and_text_apart_and_a_file_has_no_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    texts = [Continued(prompt="one", text=" two"), Continued(prompt="three", text=" \u00e9\n")]
    monkeypatch.setattr("sys.stdout", _Terminal())
    assert printed(texts[:1], as_json=False) == "\033[1mone\033[0m two\n"
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert printed(texts, as_json=False) == "one two\n\nthree \u00e9\n\n"
    assert printed(texts, as_json=True).splitlines() == [
        '{"prompt": "one", "text": " two"}',
        '{"prompt": "three", "text": " \u00e9\\n"}',
    ]
