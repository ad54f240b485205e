"""Checks of files of the tokenizers library, whose Rust code would otherwise never end, or print a panic.

A few lines of ``tokenizer.json`` can double every space thirty times. How much longer a text can become is computed
from the file: it is bounded before the library reads a text.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.errors import DataError

_MAX_GROWTH = 1000
"""How many times as long a text may become; ALBERT's normalizers have about 600, of which texts need at most 18."""
_WIDEST = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "ByteLevel": 4,
    "BertNormalizer": 12,
}
"""Characters that normalizers make of one."""
_MAY_MATCH_NOTHING = re.compile(r"\(\?|\\[bBAGzZKyY]|[*?|^$]|\{0|\{,")
"""Parts of regular expressions with which a match may be empty, between any two characters."""


def check_growth(folder: Path) -> None:
    """Check that a tokenizer makes no text much longer.

    Raises:
        DataError: If it may become more than ``_MAX_GROWTH`` times as long.
    """
    file = folder / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes()) if file.is_file() else {}
        growth = max(
            _growth(content.get("normalizer")),
            _growth(content.get("decoder")),
            _copies(content.get("post_processor")),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # reported when the library reads it
    if growth > _MAX_GROWTH:
        times = f"{growth:,.0f}" if growth < 1e12 else "countless"
        raise DataError(
            f"{file}: expected a tokenizer that makes texts at most {_MAX_GROWTH} times as long, got up to {times} "
            "times; do not trust its source"
        )


class _Lengths:
    """Upper bounds of the final length of single characters, from one step of a normalizer on."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self.other = 1.0
        """Of all characters that are not in ``of``."""

    def total(self, text: str) -> float:
        """Final length of a text."""
        return sum(self.of.get(character, self.other) for character in text)

    def widest(self) -> float:
        """Final length of any character."""
        return max([self.other, *self.of.values()])

    def become(self, length: float) -> None:
        """Set the length of all characters."""
        self.of.clear()
        self.other = length


def _growth(node: Any) -> float:
    """How many times as long a text may become by a normalizer or decoder, computed from the last step to the first."""
    lengths = _Lengths()
    for step in reversed(list(_steps(node))):
        kind = step.get("type")
        if kind == "Replace":
            _before_replace(lengths, step)
        elif kind == "Precompiled":
            lengths.become(lengths.widest() * _longest_entry(step["precompiled_charsmap"]))
        elif kind != "Strip":
            lengths.become(lengths.widest() * _WIDEST.get(str(kind), 1))
    return lengths.widest()


def _before_replace(lengths: _Lengths, step: Mapping[str, Any]) -> None:
    """Change ``lengths`` from those after a replacement to those before it."""
    pattern = step["pattern"]
    replaced = lengths.total(step["content"])
    if "String" in pattern:
        text = pattern["String"]
        for character in set(text):
            own = lengths.of.get(character, lengths.other)
            lengths.of[character] = max(own, replaced / len(text))
    elif _MAY_MATCH_NOTHING.search(pattern["Regex"]):
        lengths.become(lengths.widest() + replaced)
    else:
        lengths.become(max(lengths.widest(), replaced))


def _steps(node: Any) -> Iterator[Mapping[str, Any]]:
    """Steps of a normalizer or decoder, in order, with those of nested sequences."""
    if node is None:
        return
    if node.get("type") != "Sequence":
        yield node
        return
    for each in node.get("normalizers") or node.get("decoders") or ():
        yield from _steps(each)


def _longest_entry(charsmap: str) -> int:
    """Longest replacement in a map of SentencePiece: size of a trie (4 bytes), trie, and texts that end with zero."""
    content = base64.b64decode(charsmap)
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _copies(node: Any) -> float:
    """How many times a post-processor puts a text into its result."""
    if node is None:
        return 1
    if node.get("type") == "Sequence":
        return math.prod(map(_copies, node["processors"]))
    return max(1, sum("Sequence" in piece for piece in node.get("single") or ()))


@contextlib.contextmanager
def panics_as_errors(source: object) -> Iterator[None]:
    """Convert a panic of the tokenizers library, which is no ``Exception``, to a ``DataError``.

    Args:
        source: The tokenizer's directory, for messages.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:100]
        raise DataError(
            f"{source}: the tokenizers library failed ({reason}); use another tokenizer"
        ) from None


@contextlib.contextmanager
def without_printed_panics() -> Iterator[None]:
    """Discard what the library prints of a panic to the process's stderr; anything else is printed when it ends."""
    sys.stderr.flush()
    own = os.dup(2)
    is_panic = False
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            raise
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            printed.seek(0)
            if not is_panic and (text := printed.read()):
                os.write(2, text)
