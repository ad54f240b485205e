"""Text encodings: bytes of text files and JSON lines become text, or a problem that names the byte.

Text that is not what its encoding says is refused, since a corpus whose accented letters have become U+FFFD is ruined
and looks complete. ``errors="replace"`` replaces and counts instead. The byte order mark of another encoding is a
problem, too; that of the encoding itself is dropped.
"""

from __future__ import annotations

import codecs
import string
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_megatron.errors import ConfigError, require_choice

DecodingErrors: TypeAlias = Literal["strict", "replace"]
"""Whether bytes that are none of an encoding are a problem, or become U+FFFD and are counted."""

_REPLACEMENT = "\ufffd"
_BYTE_ORDER_MARK = "\ufeff"
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks and their encodings; that of UTF-32 begins with that of UTF-16, so it comes first."""


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """Encoding of input texts."""

    name: str = "utf-8"
    """As Python knows it: utf-8, latin-1, cp1252, utf-16, ..."""
    errors: DecodingErrors = "strict"
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
    def codec(self) -> str:
        """Python's own name for it."""
        return codecs.lookup(self.name).name

    @property
    def is_utf8(self) -> bool:
        """Whether it is UTF-8, under any of its names."""
        return self.codec in ("utf-8", "utf-8-sig")

    @property
    def is_wide(self) -> bool:
        """Whether a letter takes several bytes, as in UTF-16: zero bytes then are part of letters."""
        one = len("a".encode(self.name))
        two = len("aa".encode(self.name))
        return two - one > 1

    @property
    def extends_ascii(self) -> bool:
        """Whether ASCII text has its own bytes: only then can a file be cut into lines before it is decoded."""
        if self.is_utf8:
            return True
        encoded = string.printable.encode(self.name, errors="replace")
        return encoded == string.printable.encode()


class UndecodableError(ValueError):
    """Bytes are none of the encoding; the message continues ``FILE ...``."""


class Decoder:
    """Decodes texts, and counts the characters that it had to replace.

    Args:
        encoding: Encoding of the texts.
        fix: What to do about bytes that are none of the encoding, for messages.
    """

    def __init__(
        self,
        encoding: TextEncoding,
        fix: str = "give its encoding (encoding=latin-1, utf-16) or errors=replace, or save it as UTF-8",
    ) -> None:
        self.encoding = encoding
        self.num_replaced = 0
        """Characters replaced by U+FFFD, over all texts."""
        self.is_utf8 = encoding.is_utf8
        """Whether the encoding is UTF-8, under any of its names."""
        self._fix = fix
        # A byte order mark at the beginning of a file is no part of its text.
        self._codec = "utf-8-sig" if self.is_utf8 else encoding.codec

    def decode(self, data: bytes) -> str:
        """Text of a whole file or line.

        Raises:
            UndecodableError: With the offset of the first byte that is none of the encoding.
        """
        self.check_mark(data)
        try:
            return data.decode(self._codec).removeprefix(_BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            if self.encoding.errors == "strict":
                # The codec may have cut off the byte order mark.
                offset = len(data) - len(error.object) + error.start
                raise UndecodableError(
                    f"is not {self.encoding.name}: byte 0x{data[offset]:02x} at offset {offset} of it; {self._fix}"
                ) from None
        text = data.decode(self._codec, errors="replace").removeprefix(_BYTE_ORDER_MARK)
        # Without what is replaced, only the U+FFFD of the text itself are left.
        own = data.decode(self._codec, errors="ignore").count(_REPLACEMENT)
        self.num_replaced += text.count(_REPLACEMENT) - own
        return text

    def replace_surrogates(self, text: str) -> str:
        """Replace lone surrogates as the function of this name does, and count them."""
        replaced = replace_surrogates(text)
        if replaced is not text:
            self.num_replaced += replaced.count(_REPLACEMENT) - text.count(_REPLACEMENT)
        return replaced

    def check_mark(self, data: bytes) -> None:
        """Check that the data does not begin with the byte order mark of another encoding.

        Raises:
            UndecodableError: If it does: many encodings would decode the bytes, to nonsense.
        """
        for mark, codec in _MARKS.items():
            if not data.startswith(mark):
                continue
            if self.encoding.codec.startswith(codec):
                return
            raise UndecodableError(
                f"is not {self.encoding.name}: it begins with the byte order mark of {codec}; {self._fix}"
            )


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and no tokenizer accepts, by U+FFFD; a pair is one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
