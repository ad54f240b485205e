"""Text encodings: bytes of text files and JSON lines become text, or a problem that names the byte.

Text that is not what its encoding says is refused, since a corpus whose accented letters have become U+FFFD is ruined
and looks complete. ``errors="replace"`` replaces and counts instead.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import ConfigError, require_choice

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """Encoding of input texts."""

    name: str = "utf-8"
    """As Python knows it: utf-8, latin-1, cp1252, utf-16, ..."""
    errors: Literal["strict", "replace"] = "strict"
    """Whether bytes that are none of the encoding are a problem, or become U+FFFD."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: If Python has no such text encoding.
        """
        require_choice("errors", self.errors, ("strict", "replace"))
        try:
            "a".encode(self.name)
        except (LookupError, ValueError, TypeError):
            raise ConfigError(
                f"encoding={self.name!r}: expected a text encoding such as utf-8, latin-1 or utf-16; correct it"
            ) from None

    @property
    def is_utf8(self) -> bool:
        """Whether it is UTF-8, under any of its names."""
        return codecs.lookup(self.name).name in ("utf-8", "utf-8-sig")

    @property
    def is_wide(self) -> bool:
        """Whether a letter takes several bytes, as in UTF-16: zero bytes and newlines then mean something else."""
        return len("aa".encode(self.name)) - len("a".encode(self.name)) > 1


class UndecodableError(ValueError):
    """Bytes are none of the encoding; the message continues ``FILE ...``."""


class Decoder:
    """Decodes texts, and counts the characters that it had to replace.

    Args:
        encoding: Encoding of the texts.
    """

    def __init__(self, encoding: TextEncoding) -> None:
        self.encoding = encoding
        self.num_replaced = 0
        """Characters replaced by U+FFFD, over all texts."""
        # A byte order mark at the beginning of a file is no part of its text.
        self._codec = "utf-8-sig" if encoding.is_utf8 else encoding.name

    def decode(self, data: bytes) -> str:
        """Text of a whole file or line.

        Raises:
            UndecodableError: With the offset of the first byte that is none of the encoding.
        """
        try:
            return data.decode(self._codec)
        except UnicodeDecodeError as error:
            if self.encoding.errors == "strict":
                raise UndecodableError(
                    f"is not {self.encoding.name}: byte 0x{data[error.start]:02x} at offset {error.start} of it; name "
                    "its encoding (--encoding latin-1), choose --errors replace, or save it as UTF-8"
                ) from None
        text = data.decode(self._codec, errors="replace")
        self.num_replaced += text.count(_REPLACEMENT) - self._count_own(data)
        return text

    def _count_own(self, data: bytes) -> int:
        """How many U+FFFD the text has by itself."""
        try:
            return data.count(_REPLACEMENT.encode(self.encoding.name))
        except UnicodeEncodeError:
            return 0
