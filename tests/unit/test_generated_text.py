"""Are prompts and texts told apart on a terminal, and free of its codes in a file?"""

from __future__ import annotations

import io

import pytest

from lightning_megatron.cli.generated_text import Continued, TextPrinter, cut


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "stop", "expected"), [("a;b|c", ("|", ";"), "a;"), ("abc", (), "abc"), ("abc", ("d",), "abc")]
)
def test_a_text_is_cut_behind_the_first_stop_text(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert cut(text, stop) == expected


def _printed(texts: list[Continued], out: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, as_json: bool) -> str:
    monkeypatch.setattr("sys.stdout", out)
    printer = TextPrinter(as_json=as_json)
    printer.show(texts)
    printer.end()
    return out.getvalue()


def test_a_terminal_tells_prompt_and_text_apart_and_a_file_has_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    texts = [Continued(prompt="one", text=" two"), Continued(prompt="three", text=" \u00e9\n")]
    assert _printed(texts[:1], _Terminal(), monkeypatch, as_json=False) == "\033[1mone\033[0m two\n"
    assert _printed(texts, io.StringIO(), monkeypatch, as_json=False) == "one two\n\nthree \u00e9\n\n"
    assert _printed(texts, io.StringIO(), monkeypatch, as_json=True).splitlines() == [
        '{"prompt": "one", "text": " two"}',
        '{"prompt": "three", "text": " \u00e9\\n"}',
    ]
