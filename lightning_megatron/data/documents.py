"""Find input files and read their documents: JSON lines, Parquet tables and text files, plain, gzip or zstd.

Which files: a directory is searched recursively for ``.jsonl`` and ``.parquet`` files and the text files named in
``TEXT_SUFFIXES``, compressed ones (``.gz``, ``.zst``) too, except hidden ones and those in hidden directories and in
``SKIPPED_FOLDERS``; links to files are followed, links to directories are not. A pattern with ``*``, ``?`` or ``[``
gives every file that it matches (``**`` crosses directories) and searches matched directories likewise. A file named
explicitly is always read. Inputs keep the order in which they are given, files within an input are sorted by path, and
duplicates are dropped, so the same inputs give the same documents in the same order on every machine.

Which documents: a text file is one document; a JSON line or a table row has one under each key. Bytes that are not of
the given encoding make a document bad (``TextEncoding``). Lone surrogates in a JSON string become U+FFFD and are
counted: real corpora contain a few of them. A byte order mark at the beginning of a file is dropped.

The input is cut into pieces of similar size that worker processes tokenize independently. JSON lines and tables are
read by the process that cuts, which is a hundred times faster than tokenizing: one large file feeds all workers,
compressed or not. Text files are only named in a piece, and opened by the worker that tokenizes them.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from lightning_megatron.data.encoding import Decoder, TextEncoding, UndecodableError
from lightning_megatron.data.parquet import read_pages
from lightning_megatron.errors import ConfigError, DataError, require_choice

try:
    import orjson as _orjson
except ImportError:  # in the extra "data"
    _orjson = None  # type: ignore[assignment]

JSON_LINES_SUFFIXES = (".jsonl", ".json")
"""Suffixes of files with one JSON object per line; a directory search reads only the first."""
COMPRESSION_SUFFIXES = (".gz", ".zst")
TEXT_SUFFIXES = frozenset(
    (
        ".txt",
        ".text",
        ".md",
        ".rst",
        ".tex",
        ".html",
        ".css",
        ".toml",
        ".yaml",
        ".yml",
        ".ini",
        ".cfg",
        ".sh",
        ".sql",
    )
    + (
        ".py",
        ".pyi",
        ".pyx",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".cxx",
        ".hpp",
        ".cu",
        ".cuh",
        ".java",
        ".kt",
        ".scala",
    )
    + (
        ".js",
        ".jsx",
        ".ts",
        ".tsx",
        ".go",
        ".rs",
        ".rb",
        ".php",
        ".swift",
        ".r",
        ".jl",
        ".lua",
        ".pl",
    )
)
"""Suffixes, lower case, of the text and source files that a directory search reads."""
SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))
"""Directories that a search skips unless they are named: caches, and packages installed into a source tree."""
PLAIN_TEXT_KEY = "text"
"""Key of a text file's content, as if it were a JSON line."""

PIECE_BYTES = 1 << 19
"""Approximate size of a piece, in decompressed bytes: repetitive lines grow ten thousandfold when decompressed, and no
piece may be that large."""
MIN_LARGEST_DOCUMENT = 1 << 20
MAX_LARGEST_DOCUMENT = 1 << 30
MAX_DOCUMENT_EXPANSION = 20
"""Default limit of a document in a compressed file: so many times the size of the file, between these two limits. A few
kilobytes can decompress to one document of gigabytes."""
MAX_REPORTED = 20
"""Bad documents of a run that are reported one by one; further ones are only counted."""

_COMPRESSED_BYTES = 1 << 16
"""Compressed bytes read at a time; text decompresses to about ten times as many."""
_ZSTD_BYTES = 1 << 11
"""Compressed bytes given to zstd at a time, which cannot be told to pause: they decompress to at most 64 MiB."""
_MAX_ZSTD_WINDOW = 1 << 31
"""Window of ``zstd --long=31``, with which large public corpora are compressed."""
_MIN_ZSTD_WINDOW = 1 << 27
"""Window that a file of any size may have; the decompressor comes to hold as many bytes."""
_MAX_EXPANSION = 500
_MIN_LARGEST_FILE = 1 << 24
"""A file may decompress to ``_MAX_EXPANSION`` times its size and so many bytes more."""
_MAX_ROWS = 1 << 14
_MAX_BAD_ROWS = 1 << 16
"""Maximum number of rows to report if a column is missing."""
_MAX_REPEATED_BYTES = 1 << 26
"""Maximum size of the rows read at a time if each is the whole dictionary of its column."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one process tokenizes: text files, JSON lines or table rows."""

    path: str = ""
    """Input file; empty for text files."""
    num_bytes: int
    """Bytes of input as stored on disk; those of all pieces of a file add up to its size."""
    files: tuple[str, ...] = ()
    """Text files of one document each, plain or compressed."""
    max_document_bytes: int | None = None
    """Limit of a document, see ``document_limit``; for text files as given by the user."""
    lines: bytes = b""
    """Complete JSON lines; only the last line of a file may lack its newline."""
    rows: Sequence[dict[str, Any]] = ()
    """Table rows, as dicts by column."""
    first: int = 1
    """Number of the first line or row in its file, from 1."""
    problem: str = ""
    """Why the rest of the file cannot be read, and how to fix it."""


class BadDocuments:
    """Counts and reports invalid documents, in input order.

    Args:
        on_error: "fail" raises at the first one, "skip" leaves them out.
        bar: A ``progress_bar``, above which they are reported.
    """

    def __init__(self, on_error: Literal["skip", "fail"], bar: Any) -> None:
        self.count = 0
        """Documents left out."""
        require_choice("on_error", on_error, ("skip", "fail"))
        self._on_error, self._bar = on_error, bar

    def add(self, messages: Sequence[str]) -> None:
        """Report the bad documents of the next piece.

        Raises:
            DataError: For the first one, with its location, if ``on_error`` is "fail".
        """
        for message in messages:
            if self._on_error == "fail":
                raise DataError(message)
            self.count += 1
            if self.count <= MAX_REPORTED:
                more = "; further ones are only counted" * (self.count == MAX_REPORTED)
                self._bar.write(f"skipped: {message}{more}", file=sys.stderr)


def format_of(path: str | Path) -> tuple[Literal["json lines", "text", "parquet"], str]:
    """Format and compression of a file, by its name.

    Returns:
        The format: one JSON object per line, one document per file, or one table row per document; and the suffix of
        the compression of the whole file, "" if there is none (Parquet compresses columns itself).
    """
    stem, suffix = os.path.splitext(os.fspath(path).lower())
    compression = suffix if suffix in COMPRESSION_SUFFIXES else ""
    suffix = os.path.splitext(stem)[1] if compression else suffix
    if suffix in JSON_LINES_SUFFIXES:
        return "json lines", compression
    return "parquet" if suffix == ".parquet" and not compression else "text", compression


def find_files(inputs: Sequence[str | Path], keys: Sequence[str] = (PLAIN_TEXT_KEY,)) -> list[Path]:
    """Files named by ``inputs``, in document order, without duplicates.

    Args:
        inputs: Files, directories and patterns.
        keys: Keys to be read; text files have only ``text``.

    Raises:
        DataError: If an input does not exist, or matches or contains no file, or a text file lacks the key.
        ConfigError: If reading a file needs a library that is not installed.
    """
    files: dict[str, Path] = {}
    for item in inputs:
        for path in _files_of_input(item):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        content, compression = format_of(path)
        if content == "parquet" or compression == ".zst":
            require_library("pyarrow" if content == "parquet" else "zstandard", f"reading {path}")
        if content == "text" and list(keys) != [PLAIN_TEXT_KEY]:
            raise DataError(
                f"json keys {', '.join(keys)}: {path} is a text file, which has only '{PLAIN_TEXT_KEY}'"
            )
    return list(files.values())


def require_library(name: str, purpose: str) -> None:
    """Check that an optional library is installed, before anything is read.

    Raises:
        ConfigError: If the library ``name`` is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"{purpose} needs the library {name}; pip install 'lightning-megatron[data]'"
        )


def progress_bar(files: Sequence[Path], activity: str, delay: float = 0) -> Any:
    """A tqdm progress bar over the stored bytes of ``files``; 1 MB/s is 10**6 bytes per second."""
    from tqdm import tqdm

    # A log file gets one line every ten seconds, a terminal two updates per second.
    interval, total = 0.5 if sys.stderr.isatty() else 10, sum(path.stat().st_size for path in files)
    return tqdm(
        total=total, unit="B", unit_scale=True, desc=activity, mininterval=interval, delay=delay
    )


def document_limit(path: str | Path, max_document_bytes: int | None = None) -> int:
    """Maximum bytes of one document in a file: a text, a JSON line or a table row.

    Args:
        path: The file.
        max_document_bytes: The limit that the user gives; None: the size of a plain file, and for a compressed one or a
            table ``MAX_DOCUMENT_EXPANSION`` times its size, at least 1 MiB and at most 1 GiB.
    """
    size: int = os.path.getsize(path)
    if max_document_bytes is not None:
        return max_document_bytes
    content, compression = format_of(path)
    if content != "parquet" and not compression:
        return size
    return min(max(MIN_LARGEST_DOCUMENT, MAX_DOCUMENT_EXPANSION * size), MAX_LARGEST_DOCUMENT)


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
    for path in files:
        (content, _), size = format_of(path), path.stat().st_size
        if group and (content != "text" or group_bytes + size > piece_bytes):
            yield Piece(
                files=tuple(group), num_bytes=group_bytes, max_document_bytes=max_document_bytes
            )
            group, group_bytes = [], 0
        if content == "text":
            group.append(str(path))
            group_bytes += size
        elif content == "parquet":
            yield from _cut_rows(
                str(path), size, keys, piece_bytes, document_limit(path, max_document_bytes)
            )
        else:
            yield from _cut_lines(
                str(path), size, piece_bytes, document_limit(path, max_document_bytes)
            )
    if group:
        yield Piece(
            files=tuple(group), num_bytes=group_bytes, max_document_bytes=max_document_bytes
        )


def read_documents(
    piece: Piece, keys: Sequence[str], decoder: Decoder | None = None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Documents of ``piece`` in order, one text per key; and a message for each bad one: location, problem and fix.

    Args:
        piece: As yielded by ``cut_into_pieces``.
        keys: Keys of JSON objects, or columns.
        decoder: Decodes text files and JSON lines, and counts what it replaces; None: strict UTF-8.
    """
    documents = list(_documents(piece, keys, decoder or Decoder(TextEncoding())))
    bad = [f"{location} {problem}" for location, problem in documents if isinstance(problem, str)]
    return [texts for _, texts in documents if isinstance(texts, tuple)], bad


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
        for piece in _cut_lines(str(file), file.stat().st_size, PIECE_BYTES, document_limit(file)):
            on_bytes(piece.num_bytes)
            for location, record in _records(piece, decoder):
                if isinstance(record, str):
                    raise DataError(f"{location} {record}")
                yield location, record


# ---- pieces to documents --------------------------------------------------------------------------------------------


def _documents(
    piece: Piece, keys: Sequence[str], decoder: Decoder
) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    """Location of each document, with its texts (one per key) or the problem and its fix."""
    for path in piece.files:
        yield path, _read_text(path, piece.max_document_bytes, decoder)
    for location, record in _records(piece, decoder):
        texts = record if isinstance(record, str) else _extract_texts(record, keys, decoder)
        if (
            isinstance(texts, tuple)
            and piece.rows
            and sum(map(len, texts)) > (piece.max_document_bytes or math.inf)
        ):
            texts = _too_long(piece.max_document_bytes or 0)
        yield location, texts


def _records(piece: Piece, decoder: Decoder) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Location of each row and each line that is not blank, with its content or the problem and its fix."""
    limit = piece.max_document_bytes
    for number, line in enumerate(piece.lines.split(b"\n"), piece.first):
        if line and not line.isspace():
            is_long = limit is not None and len(line) > limit
            yield (
                f"{piece.path}, line {number}",
                _too_long(limit or 0) if is_long else _parse_line(line, decoder),
            )
    for number, row in enumerate(piece.rows, piece.first):
        yield f"{piece.path}, row {number}", row
    if piece.problem:
        yield piece.path, piece.problem


def _read_text(path: str, max_document_bytes: int | None, decoder: Decoder) -> tuple[str] | str:
    parts: list[bytes] = []
    size = 0
    try:
        limit = document_limit(path, max_document_bytes)
        for part, _ in read_parts(path):
            parts.append(part)
            size += len(part)
            if size > limit:
                return _too_long(limit)
    except OSError as error:
        return _read_failure(error)
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
        reason = (
            f"{error.msg} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else error
        )
        return f"is not JSON ({reason}); correct or remove that line"
    if not isinstance(record, dict):
        return f"has the type {type(record).__name__}, expected a JSON object; write one object per line"
    return record


def _extract_texts(
    record: dict[str, Any], keys: Sequence[str], decoder: Decoder
) -> tuple[str, ...] | str:
    texts = []
    for key in keys:
        text = record.get(key)
        if key not in record:
            return f"has no key '{key}'; choose the json key from {', '.join(record) or 'none'}"
        if isinstance(text, _NoText):
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
    return json.loads(decoder.decode(content) if isinstance(content, bytes) else content)


# ---- files to pieces ------------------------------------------------------------------------------------------------


def read_parts(path: str | Path, part_bytes: int = PIECE_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield a file's decompressed content in parts of at most ``part_bytes``, each with the stored bytes read so far.

    Concatenated gzip members or zstd frames are read as one content, as of ``cat a.gz b.gz``.

    Raises:
        OSError: If the file cannot be read, is truncated, has a wrong checksum, another compression than its name, or
            decompresses to far more than text does.
    """
    _, compression = format_of(path)
    with open(path, "rb") as stream:
        while not compression and (part := stream.read(part_bytes)):
            yield part, stream.tell()
        if not compression:
            return
        size = os.fstat(stream.fileno()).st_size
        left = _MIN_LARGEST_FILE + _MAX_EXPANSION * size
        for content in _decompress(stream, compression, size):
            left -= len(content)
            if left < 0:
                raise OSError(
                    f"its {size:,} bytes decompress to more than {_MAX_EXPANSION} times as many; if it is meant to, "
                    "decompress it first"
                )
            for begin in range(0, len(content), part_bytes):
                yield content[begin : begin + part_bytes], stream.tell()


def _decompress(stream: BinaryIO, compression: str, size: int) -> Iterator[bytes]:
    """Decompressed content of a file of ``size`` bytes, in parts of at most 64 MiB.

    Raises:
        OSError: See ``read_parts``.
    """
    current: Any = None
    at_a_time = _ZSTD_BYTES if compression == ".zst" else _COMPRESSED_BYTES
    while data := stream.read(at_a_time):
        # gzip files may be padded with zeros, e.g. those on tapes.
        while data := data if current else data.lstrip(b"\0"):
            if current is None:
                current, failure = _decompressor(compression, size)
            try:
                content = current.decompress(data)
            except failure as error:
                raise OSError(f"damaged, or not compressed as its name says: {error}") from error
            yield content
            data = current.unused_data if current.eof else b""
            current = None if current.eof else current
    if current is not None:
        raise OSError("it ends in the middle of the compressed data")


def _decompressor(compression: str, size: int) -> tuple[Any, type[Exception]]:
    """A decompressor for one gzip member or zstd frame, and the exception that it raises.

    Args:
        compression: Suffix of the file.
        size: Size of the file, which limits the window.
    """
    if compression == ".gz":
        return zlib.decompressobj(
            wbits=16 + zlib.MAX_WBITS
        ), zlib.error  # 16: with gzip's header and checksum
    import zstandard

    window = min(max(_MIN_ZSTD_WINDOW, _MAX_EXPANSION * size), _MAX_ZSTD_WINDOW)
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    return decompressor.decompressobj(), zstandard.ZstdError


def _cut_lines(path: str, size: int, piece_bytes: int, max_document_bytes: int) -> Iterator[Piece]:
    buffer, problem, first, accounted = bytearray(), "", 1, 0
    try:
        for part, position in read_parts(path, piece_bytes):
            buffer += part
            unfinished = len(part) - part.rfind(b"\n") - 1
            if len(buffer) >= piece_bytes and unfinished < len(part):
                lines = bytes(buffer[: len(buffer) - unfinished])
                yield Piece(
                    path=path,
                    lines=lines,
                    first=first,
                    num_bytes=position - accounted,
                    max_document_bytes=max_document_bytes,
                )
                del buffer[: len(lines)]
                first, accounted = first + lines.count(b"\n"), position
            if len(buffer) > max_document_bytes + piece_bytes:
                raise _TooLongError(_too_long(max_document_bytes))
    except _TooLongError as error:
        problem = f"has a line after line {first - 1} that {error}; further lines are not read"
        buffer.clear()
    except OSError as error:
        problem = _read_failure(error)
        del buffer[buffer.rfind(b"\n") + 1 :]  # complete lines are still read
    if buffer or accounted < size:
        yield Piece(
            path=path,
            lines=bytes(buffer),
            first=first,
            num_bytes=size - accounted,
            problem=problem,
            max_document_bytes=max_document_bytes,
        )


class _TooLongError(Exception):
    """A document is longer than the limit."""


def _too_long(limit: int) -> str:
    return (
        f"is longer than {limit:,} bytes, the limit for a file of this size; set max_document_bytes if it is meant to "
        "be, or remove it from the inputs"
    )


def _cut_rows(
    path: str, size: int, keys: Sequence[str], piece_bytes: int, max_document_bytes: int
) -> Iterator[Piece]:
    """The columns ``keys`` of a table, with row groups of any size: pages are read as they are needed.

    Texts stay in the dictionaries of the file, so that one that many rows share is in memory once.
    """
    import pyarrow
    import pyarrow.parquet

    done = accounted = total = 0
    try:
        with (
            open(path, "rb") as stream,
            pyarrow.parquet.ParquetFile(
                path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
            ) as table,
        ):
            if (problem := _column_problem(table.schema_arrow, keys)) is not None:
                rows = min(table.metadata.num_rows, _MAX_BAD_ROWS)
                yield Piece(path=path, rows=[problem] * rows, num_bytes=size)
                return
            num_rows = table.metadata.num_rows
            rows = _rows_at_a_time(stream, table.metadata, list(keys), size, piece_bytes)
            for batch in table.iter_batches(rows, columns=list(keys), use_threads=False):
                total += batch.nbytes
                if total > _MIN_LARGEST_FILE + _MAX_EXPANSION * size:
                    raise OSError(
                        f"its {size:,} bytes become more than {_MAX_EXPANSION} times as many"
                    )
                first, done = done + 1, done + batch.num_rows
                before, accounted = accounted, size * done // num_rows
                yield Piece(
                    path=path,
                    rows=batch.to_pylist(),
                    first=first,
                    num_bytes=accounted - before,
                    max_document_bytes=max_document_bytes,
                )
    # Damaged pages raise OSError too, invalid UTF-8 raises UnicodeError.
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        yield Piece(path=path, num_bytes=size - accounted, problem=_read_failure(error))


def _column_problem(schema: Any, keys: Sequence[str]) -> dict[str, Any] | None:
    """A row with the same problem as all rows if a column is missing or holds no text; None if there is none.

    A column of lists can hold billions of items in a few bytes: only text is read.
    """
    import pyarrow

    row: dict[str, Any] = dict.fromkeys(schema.names, "")
    text_types = (
        pyarrow.types.is_string,
        pyarrow.types.is_large_string,
        pyarrow.types.is_string_view,
    )
    for field in schema:
        kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
        if field.name in keys and not any(is_text(kind) for is_text in text_types):
            row[field.name] = _NoText(str(field.type))
    is_bad = any(not isinstance(row.get(key), str) for key in keys)
    return row if is_bad else None


class _NoText:
    """Stands for the values of a column that holds no text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _rows_at_a_time(
    stream: BinaryIO, metadata: Any, columns: list[str], size: int, piece_bytes: int
) -> int:
    """Rows to read at a time, so that they take about ``piece_bytes``, and far from all memory if they repeat a text.

    Raises:
        OSError: If a page would become far larger than text does.
    """
    dictionary = num_bytes = 0
    for page in read_pages(stream, metadata, columns):
        if page.num_bytes > _MIN_LARGEST_FILE + _MAX_EXPANSION * page.stored_bytes:
            raise OSError(f"a page of {page.stored_bytes:,} bytes would become {page.num_bytes:,}")
        num_bytes += page.num_bytes
        dictionary = max(dictionary, page.num_bytes if page.is_dictionary else 0)
    bytes_per_row = max(num_bytes // max(metadata.num_rows, 1), 1)
    largest: int = min(
        _MAX_ROWS, piece_bytes // bytes_per_row, _MAX_REPEATED_BYTES // max(dictionary, 1)
    )
    return max(1, largest)


def _read_failure(error: Exception) -> str:
    reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0].rstrip(".")
    return f"cannot be read ({reason}); create or download it again, allow access, or remove it from the inputs"


# ---- inputs to files ------------------------------------------------------------------------------------------------


def _files_of_input(item: str | Path) -> list[Path]:
    path = os.path.expanduser(item)
    matches = [path]
    if glob.has_magic(str(path)) and not os.path.exists(path):
        matches = sorted(glob.glob(str(path), recursive=True))
    files = [
        file
        for match in matches
        for file in (_files_of_folder(match) if os.path.isdir(match) else [Path(match)])
    ]
    if not files:
        raise DataError(
            f"{path} matches no file, or has no .jsonl, .parquet, .txt or source file; give other inputs"
        )
    for file in files:
        # Unlike Path.is_file, this is False, not an error, for inaccessible paths and overlong names.
        if not os.path.isfile(file):
            raise DataError(
                f"{file} does not exist, or is not a file; give an existing file, directory or pattern"
            )
    return files


def _files_of_folder(folder: str | Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:  # otherwise its documents would silently be missing
        raise DataError(
            f"{error.filename} cannot be searched ({error.strerror}); allow access"
        ) from error

    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS
        )
        paths += [Path(parent, name) for name in names if _is_document_file(name)]
    return sorted((path for path in paths if os.path.isfile(path)), key=lambda path: path.parts)


def _is_document_file(name: str) -> bool:
    content, compression = format_of(name)
    suffix = os.path.splitext(name.lower().removesuffix(compression))[1]
    is_known = content == "parquet" or suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES
    return is_known and not name.startswith(".")
