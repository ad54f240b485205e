"""Documents of a corpus: from files to pieces, and from pieces to texts.

A text file is one document; a JSON line or a table row has one under each key. Bytes that are not of the given encoding
make a document bad (``TextEncoding``). Lone surrogates in a JSON string become U+FFFD and are counted: real corpora
contain a few of them. A byte order mark at the beginning of a file is dropped.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_megatron.data.decompression import read_parts
from lightning_megatron.data.encoding import Decoder, TextEncoding, UndecodableError
from lightning_megatron.data.input_files import (
    PLAIN_TEXT_KEY,
    find_files,
    format_of,
)
from lightning_megatron.data.json_lines import cut_lines
from lightning_megatron.data.pieces import (
    PIECE_BYTES,
    Piece,
    document_limit,
    read_failure,
    too_long,
)
from lightning_megatron.data.tables import NoText, cut_rows
from lightning_megatron.errors import ConfigError, DataError, require_choice

try:
    import orjson as _orjson
except ImportError:  # in the extra "data"
    _orjson = None  # type: ignore[assignment]

MAX_REPORTED = 20
"""Bad documents of a run that are reported one by one; further ones are only counted."""


class BadDocuments:
    """Counts and reports invalid documents, in input order.

    Args:
        on_error: "fail" raises at the first one, "skip" leaves them out.
        bar: A ``input_progress``, above which they are reported.
    """

    def __init__(
        self,
        on_error: Literal["skip", "fail"],
        bar: Any,
    ) -> None:
        self.count = 0
        """Documents left out."""
        require_choice("on_error", on_error, ("skip", "fail"))
        self._on_error = on_error
        self._bar = bar

    def add(self, messages: Sequence[str]) -> None:
        """Report the bad documents of the next piece.

        Raises:
            DataError: For the first one, with its location, if ``on_error`` is "fail".
        """
        for message in messages:
            if self._on_error == "fail":
                raise DataError(message)
            self.count += 1
            if self.count == MAX_REPORTED:
                message += "; further ones are only counted"
            if self.count <= MAX_REPORTED:
                self._bar.write(f"skipped: {message}", file=sys.stderr)


def cut_into_pieces(
    files: Sequence[Path],
    keys: Sequence[str] = (PLAIN_TEXT_KEY,),
    piece_bytes: int = PIECE_BYTES,
    max_document_bytes: int | None = None,
) -> Iterator[Piece]:
    """Yield all documents of ``files`` in order, in pieces of about ``piece_bytes``.

    Args:
        files: As returned by ``find_files``.
        keys: Columns to read from tables.
        piece_bytes: Bytes of text per piece; exceeded by longer documents.
        max_document_bytes: See ``document_limit``.
    """
    group: list[str] = []
    group_bytes = 0

    def end_group() -> Iterator[Piece]:
        if group:
            yield Piece(
                files=tuple(group),
                num_bytes=group_bytes,
                max_document_bytes=max_document_bytes,
            )
            group.clear()

    for path in files:
        content, _ = format_of(path)
        size = path.stat().st_size
        if content != "text" or group_bytes + size > piece_bytes:
            yield from end_group()
            group_bytes = 0
        if content == "text":
            group.append(str(path))
            group_bytes += size
            continue
        limit = document_limit(path, max_document_bytes)
        if content == "parquet":
            yield from cut_rows(str(path), size, keys, piece_bytes, limit)
        else:
            yield from cut_lines(str(path), size, piece_bytes, limit)
    yield from end_group()


def read_documents(
    piece: Piece, keys: Sequence[str], decoder: Decoder | None = None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Documents of ``piece`` in order, one text per key; and a message for each bad one: location, problem and fix.

    Args:
        piece: As yielded by ``cut_into_pieces``.
        keys: Keys of JSON objects, or columns.
        decoder: Decodes text files and JSON lines, and counts what it replaces; None: strict UTF-8.
    """
    documents: list[tuple[str, ...]] = []
    bad: list[str] = []
    decoder = decoder or Decoder(TextEncoding())
    for location, texts in _documents(piece, keys, decoder):
        if isinstance(texts, str):
            bad.append(f"{location} {texts}")
        else:
            documents.append(texts)
    return documents, bad


def read_texts(
    path: str, key: str = PLAIN_TEXT_KEY, decoder: Decoder | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each text after its location: ``FILE, line N``, ``FILE, row N``, or ``FILE`` for a text file.

    Args:
        path: A file, a directory or a pattern.
        key: Key or column of the text in .jsonl and .parquet files.
        decoder: As for ``read_documents``.

    Raises:
        DataError: With the location, if a document is bad; if a file is missing or cannot be read.
        ConfigError: If there are JSON lines that the encoding is not for.
    """
    decoder = decoder or Decoder(TextEncoding())
    files = find_files([path], [key])
    check_encoding(files, decoder.encoding)
    for piece in cut_into_pieces(files, [key]):
        for location, texts in _documents(piece, [key], decoder):
            if isinstance(texts, str):
                raise DataError(f"{location} {texts}")
            yield location, texts[0]


def read_records(
    files: Sequence[Path], on_bytes: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON object after its location, ``FILE, line N``; blank lines are skipped.

    Args:
        files: JSON lines, also compressed, whatever their names.
        on_bytes: Called with the stored bytes of each piece read, for progress.

    Raises:
        DataError: With the location, if a line is no JSON object; if a file cannot be read.
    """
    decoder = Decoder(TextEncoding(), fix="save it as UTF-8, the encoding of JSON lines")
    for file in files:
        size = file.stat().st_size
        for piece in cut_lines(str(file), size, PIECE_BYTES, document_limit(file)):
            on_bytes(piece.num_bytes)
            for location, record in _records(piece, decoder):
                if isinstance(record, str):
                    raise DataError(f"{location} {record}")
                yield location, record


def text_of_row(row: Mapping[str, Any], key: str, location: str) -> str:
    """Text under ``key`` of a table row or a JSON object at ``location``.

    Raises:
        DataError: If there is none.
    """
    texts = _extract_texts(row, [key], Decoder(TextEncoding()))
    if isinstance(texts, str):
        raise DataError(f"{location} {texts}")
    return texts[0]


def text_of_line(line: bytes, key: str, location: str) -> str:
    """Text under ``key`` of the JSON line at ``location``.

    Raises:
        DataError: If there is none.
    """
    decoder = Decoder(TextEncoding(), fix="save it as UTF-8, the encoding of JSON lines")
    record = _parse_line(line, decoder)
    if isinstance(record, str):
        raise DataError(f"{location} {record}")
    return text_of_row(record, key, location)


def text_of_file(path: str) -> str:
    """Text of a file in UTF-8, plain or compressed.

    Raises:
        DataError: If it cannot be read, or is no text.
    """
    texts = _read_text(path, None, Decoder(TextEncoding(), fix="save it as UTF-8"))
    if isinstance(texts, str):
        raise DataError(f"{path} {texts}")
    return texts[0]


def _documents(
    piece: Piece, keys: Sequence[str], decoder: Decoder
) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    """Location of each document, with its texts (one per key) or the problem and its fix."""
    for path in piece.files:
        yield path, _read_text(path, piece.max_document_bytes, decoder)
    for location, record in _records(piece, decoder):
        if isinstance(record, str):
            yield location, record
            continue
        texts = _extract_texts(record, keys, decoder)
        if piece.rows and not isinstance(texts, str):
            texts = _limited(texts, piece.max_document_bytes)
        yield location, texts


def _limited(texts: tuple[str, ...], limit: int | None) -> tuple[str, ...] | str:
    """The texts of a row, or the problem that they are too long."""
    if limit is not None and sum(map(len, texts)) > limit:
        return too_long(limit)
    return texts


def _records(piece: Piece, decoder: Decoder) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Location of each row and each line that is not blank, with its content or the problem and its fix."""
    limit = piece.max_document_bytes
    for number, line in enumerate(piece.lines.split(b"\n"), piece.first):
        if not line or line.isspace():
            continue
        location = f"{piece.path}, line {number}"
        if limit is not None and len(line) > limit:
            yield location, too_long(limit)
        else:
            yield location, _parse_line(line, decoder)
    for number, row in enumerate(piece.rows, piece.first):
        yield f"{piece.path}, row {number}", row
    if piece.problem:
        yield piece.path, piece.problem


def _read_text(
    path: str,
    max_document_bytes: int | None,
    decoder: Decoder,
) -> tuple[str] | str:
    parts: list[bytes] = []
    size = 0
    try:
        limit = document_limit(path, max_document_bytes)
        for part, _ in read_parts(path):
            parts.append(part)
            size += len(part)
            if size > limit:
                return too_long(limit)
    except OSError as error:
        return read_failure(error)
    data = b"".join(parts)
    try:
        decoder.check_mark(data)
        if b"\0" in data and not decoder.encoding.is_wide:
            return "is not a text file: it contains zero bytes; remove it from the inputs"
        text = decoder.decode(data)
    except UndecodableError as error:
        return str(error)
    if decoder.encoding.is_wide and "\0" in text:
        return f"is not a text file in {decoder.encoding.name}: it contains zeros; remove it from the inputs"
    return (text,)


def check_encoding(files: Sequence[Path], encoding: TextEncoding) -> None:
    """Check that files can be cut into lines in this encoding.

    Raises:
        ConfigError: If there are JSON lines in UTF-16, EBCDIC or the like.
    """
    for path in files:
        if not encoding.extends_ascii and format_of(path)[0] == "json lines":
            raise ConfigError(
                f"encoding={encoding.name}: expected one with the bytes of ASCII for JSON lines ({path}), whose "
                "standard is UTF-8; save them as UTF-8"
            )


def _parse_line(line: bytes, decoder: Decoder) -> dict[str, Any] | str:
    """The JSON object of a line, or the problem and its fix."""
    try:
        record = _decode_and_load(line, decoder)
    except UndecodableError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        return f"is not JSON ({reason}); correct or remove that line"
    if not isinstance(record, dict):
        return f"has the type {type(record).__name__}, expected a JSON object; write one object per line"
    return record


def _extract_texts(
    record: Mapping[str, Any], keys: Sequence[str], decoder: Decoder
) -> tuple[str, ...] | str:
    texts = []
    for key in keys:
        if key not in record:
            return f"has no key '{key}'; choose the json key from {', '.join(record) or 'none'}"
        text = record[key]
        if isinstance(text, NoText):
            return f"has the type {text.kind} under '{key}', expected a string; store text there"
        if not isinstance(text, str):
            return f"has the type {type(text).__name__} under '{key}', expected a string; store text there"
        texts.append(text if text.isascii() else decoder.replace_surrogates(text))
    return tuple(texts)


def _decode_and_load(line: bytes, decoder: Decoder) -> Any:
    """Parse a line by orjson, else by ``json.loads``: slow, but accepts NaN and lone surrogates and explains errors.

    orjson decodes UTF-8 itself, strictly. ``json.loads`` gets text, as of bytes it guesses the encoding, and takes
    encoded surrogates for characters.

    Raises:
        UndecodableError: If it is not in the decoder's encoding.
        ValueError: If it is not JSON.
    """
    content = line if decoder.is_utf8 else decoder.decode(line)
    if _orjson is not None:
        with contextlib.suppress(ValueError):
            return _orjson.loads(content)
    if isinstance(content, bytes):
        content = decoder.decode(content)
    return json.loads(content)
