"""How does ``generate`` show texts? For readers, or for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_BOLD, _PLAIN = "\033[1m", "\033[0m"


@dataclass(frozen=True, kw_only=True)
class Continued:
    """A prompt and one text that follows it."""

    prompt: str
    text: str

    def as_json(self) -> str:
        """One line."""
        return json.dumps({"prompt": self.prompt, "text": self.text}, ensure_ascii=False)


def printed(continued: Sequence[Continued], *, as_json: bool) -> str:
    """All texts: each behind its prompt and a blank line between two, or a line of JSON each."""
    if as_json:
        return "".join(each.as_json() + "\n" for each in continued)
    return "\n\n".join(_marked(each.prompt, sys.stdout) + each.text for each in continued) + "\n"


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the end of the first of the stop texts."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text


def _marked(prompt: str, out: TextIO) -> str:
    """The prompt; bold on a terminal, so that one sees where the model goes on."""
    is_plain = not out.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return prompt if is_plain else f"{_BOLD}{prompt}{_PLAIN}"
