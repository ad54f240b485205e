"""How does ``generate`` show texts? At once or as they come, for readers or for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor

from lightning_megatron.generate.texts import continuation

_BOLD, _PLAIN = "\033[1m", "\033[0m"
_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers give for bytes that are no whole character (yet)."""


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A prompt and one text that follows it."""

    prompt: str
    text: str

    def as_json(self, *, only_ascii: bool = False) -> str:
        """One line."""
        return json.dumps({"prompt": self.prompt, "text": self.text}, ensure_ascii=only_ascii)


class TextPrinter:
    """Writes texts as soon as they are there: for readers, behind their prompts, or for programs, as lines of JSON."""

    def __init__(self, *, as_json: bool, between: str = "") -> None:
        """Set how.

        Args:
            as_json: A line for each text; else a blank line between two.
            between: What stands between a prompt and its text.
        """
        self._as_json = as_json
        self._between = between
        self._is_first = True

    def show(self, continued: Sequence[Continued]) -> None:
        """Write some more texts."""
        for each in continued:
            if self._as_json:
                sys.stdout.write(each.as_json(only_ascii=not _shows_everything(sys.stdout)) + "\n")
                continue
            sys.stdout.write("" if self._is_first else "\n\n")
            sys.stdout.write(_marked(each.prompt, sys.stdout) + self._between + each.text)
            self._is_first = False
        sys.stdout.flush()

    def end(self) -> None:
        """There are no more."""
        if not self._is_first:
            sys.stdout.write("\n")


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the end of the first of the stop texts."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text


class TextStream:
    """Writes one text while it grows, never a part of a character, and nothing behind a stop text."""

    def __init__(self, tokenizer: Any, prompt: str, tokens: Sequence[int], stop: Sequence[str]) -> None:
        """Set what the text follows.

        Args:
            tokenizer: Of transformers.
            prompt: As the user wrote it.
            tokens: Those of the prompt.
            stop: Texts that end it.
        """
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._given = list(tokens)
        self._stop = stop
        self._new: list[int] = []
        self._shown = 0

    def begin(self) -> None:
        """Write the prompt."""
        self._write(_marked(self._prompt, sys.stdout))

    def add(self, tokens: Tensor) -> None:
        """Write what the next token makes readable.

        Args:
            tokens: [1]; -1 once the text is finished.
        """
        token = int(tokens[0])
        if token >= 0:
            self._new.append(token)
            self._show(is_whole=False)

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._show(is_whole=True)
        self._write("\n")

    def _show(self, *, is_whole: bool) -> None:
        text = cut(continuation(self._tokenizer, self._given, self._new), self._stop)
        ready = text if is_whole else text.rstrip(_HALF_CHARACTER)
        if len(ready) > self._shown:
            self._write(ready[self._shown :])
            self._shown = len(ready)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def show_what_can_be_shown() -> None:
    """Have standard output write ? for what its encoding lacks, instead of failing there."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not _shows_everything(sys.stdout):
        sys.stdout.reconfigure(errors="replace")


def _shows_everything(out: TextIO) -> bool:
    """Whether every character can be written; what is no file takes any."""
    return not out.encoding or out.encoding.lower().startswith("utf")


def _marked(prompt: str, out: TextIO) -> str:
    """The prompt; bold on a terminal, so that one sees where the model goes on."""
    is_plain = not out.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return prompt if is_plain else f"{_BOLD}{prompt}{_PLAIN}"
