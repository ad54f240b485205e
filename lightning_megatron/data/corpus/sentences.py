"""Where do the sentences of a text begin and end?

The rules and lists of abbreviations are those of sentencex (MIT licence), which ships them: nothing is downloaded.
"""

from __future__ import annotations

import re

from lightning_megatron.data.corpus.files import require_library
from lightning_megatron.errors import ConfigError

# sentencex 1.0.32 panics at white space of several bytes between an initial and a period; with spaces it never does.
_WIDE_SPACE = re.compile("[\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


class SentenceSplitter:
    """Cuts texts into sentences.

    Args:
        language: ISO 639 code.
        keep_newlines: Leave the white space between two sentences at the end of the first; else it is dropped.

    Raises:
        ConfigError: If ``language`` is no such code, or the library is not installed.
    """

    def __init__(self, language: str, keep_newlines: bool) -> None:
        # The library takes anything it does not know for English-like.
        if not re.fullmatch("[a-z]{2,3}", language):
            raise ConfigError(f"language={language} is no ISO 639 code; write it like en, de or ja")
        require_library("sentencex", "split_sentences")
        self._language = language
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        """The sentences of ``text``, none of them blank."""
        plain = text if text.isascii() else _WIDE_SPACE.sub(" ", text)
        bounds: list[tuple[int, int]] = []
        position = 0
        for sentence in filter(None, map(str.strip, self._segment(plain))):
            # Found again, not counted: of a long text's white space some is missing in what comes back.
            start = plain.index(sentence, position)
            position = start + len(sentence)
            bounds.append((start, position))
        if self._keep_newlines and bounds:
            starts = [0, *(start for start, _ in bounds[1:]), len(text)]
            bounds = list(zip(starts, starts[1:], strict=False))
        return [text[start:stop] for start, stop in bounds]

    def _segment(self, plain: str) -> list[str]:
        from sentencex import segment

        try:
            sentences: list[str] = segment(self._language, plain)
        except BaseException as error:
            # A panic of the library has been printed by it; one text that stays whole is no reason to end the run.
            if type(error).__name__ != "PanicException":
                raise
            return [plain]
        return sentences
