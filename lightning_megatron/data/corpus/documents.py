"""Which documents does a piece of the input hold, and which of its lines are none?

A text file is one document; so is a JSON line or a row of a table, under each of the keys. Bytes of a text file that
are not UTF-8, and lone surrogates in a JSON string, become U+FFFD: real corpora contain a few of them. A byte order
mark at the beginning of a file says how it is encoded, and is no part of the text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data.corpus.compressed import DamagedFileError, decompress
from lightning_megatron.data.corpus.files import format_of
from lightning_megatron.data.corpus.pieces import LineBlock, LineRange, Piece, RowBatch, TextFiles, UnreadableFile

try:
    import orjson as _orjson
except ImportError:  # of the extra "data"
    _orjson = None  # type: ignore[assignment]

MAX_DESCRIBED = 10
"""Bad documents of a piece that are described; the others are counted."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_TYPES: dict[type, str] = {
    **{type(None): "null", bool: "a boolean", int: "a number", float: "a number"},
    **{str: "a string", list: "an array", dict: "an object"},
}


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """Something in the input that is no document."""

    path: str
    """The file."""
    unit: Literal["line", "row", "file"]
    """What of it is meant."""
    number: int
    """Of the line or row, counted from 1 in the piece."""
    problem: str
    """What is wrong, as the end of a sentence about the line."""
    fix: str
    """What to do."""


@dataclass(kw_only=True)
class PieceDocuments:
    """What was found in a piece."""

    documents: list[tuple[str, ...]] = field(default_factory=list)
    """One text a key."""
    bad: list[BadDocument] = field(default_factory=list)
    """The first ones of those that are none."""
    num_bad: int = 0
    """How many are none."""
    num_units: int = 0
    """Lines or rows in the piece, blank and bad ones included; 0 for text files."""

    def add_bad(self, bad: BadDocument) -> None:
        """Count one, and remember it if there are not many yet."""
        self.num_bad += 1
        if len(self.bad) < MAX_DESCRIBED:
            self.bad.append(bad)


def read_documents(piece: Piece, keys: Sequence[str], stop_at_bad: bool = True) -> PieceDocuments:
    """The documents of ``piece`` in order.

    Args:
        piece: What ``cut_into_pieces`` gave.
        keys: Of the JSON objects; a table's batches have been cut for them already.
        stop_at_bad: Leave out everything after the first bad document, as it ends the run.
    """
    found = PieceDocuments()
    if isinstance(piece, TextFiles):
        _read_text_files(piece, found, stop_at_bad)
    elif isinstance(piece, LineRange):
        try:
            lines = _lines_of_range(piece)
        except OSError as error:
            _add_unreadable(found, piece.path, error)
        else:
            _read_lines(piece.path, lines, keys, found, stop_at_bad)
    elif isinstance(piece, LineBlock):
        _read_lines(piece.path, piece.lines, keys, found, stop_at_bad)
    elif isinstance(piece, RowBatch):
        _read_rows(piece, keys, found, stop_at_bad)
    elif isinstance(piece, UnreadableFile):
        found.add_bad(BadDocument(path=piece.path, unit="file", number=0, problem=piece.problem, fix=piece.fix))
    return found


def _read_text_files(piece: TextFiles, found: PieceDocuments, stop_at_bad: bool) -> None:
    for path in piece.paths:
        try:
            data = _content(path)
        except DamagedFileError as error:
            fix = "make or fetch it again, or remove it"
            found.add_bad(BadDocument(path=path, unit="file", number=0, problem=str(error), fix=fix))
        except OSError as error:
            _add_unreadable(found, path, error)
        else:
            if b"\0" in data:
                problem, fix = "is not a text file: it contains zero bytes", "remove it from the inputs"
                found.add_bad(BadDocument(path=path, unit="file", number=0, problem=problem, fix=fix))
            else:
                found.documents.append((data.decode("utf-8-sig", errors="replace"),))
        if found.bad and stop_at_bad:
            return


def _content(path: str) -> bytes:
    compression = format_of(path).compression
    if compression:
        return b"".join(part for part, _ in decompress(path, compression))
    return Path(path).read_bytes()


def _add_unreadable(found: PieceDocuments, path: str, error: OSError) -> None:
    problem, fix = f"cannot be read ({error.strerror})", "remove it from the inputs or allow access"
    found.add_bad(BadDocument(path=path, unit="file", number=0, problem=problem, fix=fix))


def _lines_of_range(piece: LineRange) -> bytes:
    """A line belongs to the range in which it begins: one that was begun before is finished by the range before."""
    with open(piece.path, "rb") as stream:
        before = 1 if piece.start else 0
        stream.seek(piece.start - before)
        data = stream.read(piece.stop - piece.start + before)
        if before:
            _, _, data = data.partition(b"\n")
        if data and not data.endswith(b"\n"):
            data += stream.readline()
    return data


def _read_lines(path: str, data: bytes, keys: Sequence[str], found: PieceDocuments, stop_at_bad: bool) -> None:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    found.num_units = len(lines)
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        document = _parse_line(line, keys)
        if isinstance(document, tuple):
            found.documents.append(document)
            continue
        problem, fix = document
        found.add_bad(BadDocument(path=path, unit="line", number=number, problem=problem, fix=fix))
        if stop_at_bad:
            return


def _parse_line(line: bytes, keys: Sequence[str]) -> tuple[str, ...] | list[str]:
    """One text a key; or, in a list, what is wrong with the line and what to do."""
    try:
        record = _loads(line)
    except (ValueError, RecursionError) as error:
        return [f"is not JSON ({_reason(error)})", "correct or remove that line"]
    if not isinstance(record, dict):
        return [f"holds {_JSON_TYPES[type(record)]}, not a JSON object", 'write {"text": ...}']
    texts = []
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            if key not in record:
                present = ", ".join(record) or "none"
                return [f"has no key '{key}'", f"choose --json-keys from {present}"]
            return [f"has {_JSON_TYPES[type(text)]} under '{key}', not a string", "store text there"]
        texts.append(text if text.isascii() else _without_surrogates(text))
    return tuple(texts)


def _loads(line: bytes) -> Any:
    """As ``json.loads``, which takes more (NaN, halves of surrogate pairs) and says what is wrong, but is slow."""
    if _orjson is not None:
        with contextlib.suppress(ValueError):
            return _orjson.loads(line)
    return json.loads(line)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "its bytes are not UTF-8" if isinstance(error, UnicodeError) else str(error)


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def _read_rows(piece: RowBatch, keys: Sequence[str], found: PieceDocuments, stop_at_bad: bool) -> None:
    found.num_units = len(piece.columns[0])
    for number, texts in enumerate(zip(*piece.columns, strict=True), 1):
        missing = [key for key, text in zip(keys, texts, strict=True) if text is None]
        if not missing:
            found.documents.append(texts)
            continue
        problem = f"has no text under '{missing[0]}': null, or not UTF-8"
        fix = "store text there or remove that row"
        found.add_bad(BadDocument(path=piece.path, unit="row", number=number, problem=problem, fix=fix))
        if stop_at_bad:
            return
