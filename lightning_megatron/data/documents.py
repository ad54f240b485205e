"""Find input files and read their documents: JSON lines, Parquet tables and text files, plain, gzip or zstd.

Which files: a folder is searched recursively; it gives its ``.jsonl`` and ``.parquet`` files and the text files named
in ``TEXT_SUFFIXES``, compressed ones (``.gz``, ``.zst``) too, except hidden ones and those in hidden folders and in
``SKIPPED_FOLDERS``; links to files are followed, links to folders are not. A pattern with ``*``, ``?`` or ``[`` gives
every file that it matches (``**`` crosses folders) and searches matched folders likewise. A file named by itself is
always taken. Inputs keep the order in which they are given, files within an input are sorted by path, and a file
reached twice counts once, so the same inputs give the same documents in the same order on every machine.

Which documents: a text file is one; so is a JSON line or a row of a table, under each of the keys. Bytes of a text file
that are not UTF-8, and lone surrogates in a JSON string, become U+FFFD: real corpora contain a few of them. A byte
order mark at the beginning of a file is no part of the text.

The input is cut into pieces of work, all alike in size, that processes turn into tokens independently. Files of many
documents are read by the one that cuts, which is a hundred times faster than tokenizing: one large file feeds all
processes, compressed or not. Files of one document are only named, and opened by whoever tokenizes them.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from lightning_megatron.errors import ConfigError, DataError, require_choice

try:
    import orjson as _orjson
except ImportError:  # of the extra "data"
    _orjson = None  # type: ignore[assignment]

JSON_LINES_SUFFIXES = (".jsonl", ".json")
"""Suffixes of files with one JSON object a line; a folder search takes only the first."""
COMPRESSION_SUFFIXES = (".gz", ".zst")
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh", ".sql")
    + (".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala")
    + (".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".r", ".jl", ".lua", ".pl")
)
"""Suffixes, lower case, of the text and source files that a folder search takes."""
SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))
"""Folders that a folder search leaves out: caches, and packages installed into a source tree. Name them to get them."""
PLAIN_TEXT_KEY = "text"
"""The key under which the content of a text file appears, as if it were a JSON line."""

PIECE_BYTES = 1 << 19
"""Work is handed out in pieces of about this many bytes of text: lines that repeat each other grow ten thousandfold
when they are decompressed, and no piece shall be that large."""
MAX_REPORTED = 20
"""Bad documents of a run that are reported one by one; the others are counted."""

_COMPRESSED_BYTES = 1 << 16
"""Compressed bytes taken at a time; text grows to some ten times as many."""
_LONGEST_ZSTD_WINDOW = 1 << 31
"""What ``zstd --long=31`` needs; large public corpora are compressed so."""
_MOST_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one process turns into tokens; only one kind of content is there."""

    path: str = ""
    """The file; of several text files, none."""
    num_bytes: int
    """Input bytes that it stands for, as stored; over all pieces of a file, its size."""
    files: tuple[str, ...] = ()
    """Whole files of one document each, plain or compressed."""
    lines: bytes = b""
    """Whole lines; only the last one of a file may lack its newline."""
    rows: Sequence[dict[str, Any]] = ()
    """Some rows of a table, by column."""
    first: int = 1
    """Number of the first line or row in its file."""
    problem: str = ""
    """Why the rest of the file cannot be read, and what to do."""


class BadDocuments:
    """Counts and reports what is no document, in input order.

    Args:
        on_error: "fail" ends the run at the first one, "skip" leaves it out.
        bar: A ``progress_bar``, above which they are printed.
    """

    def __init__(self, on_error: Literal["skip", "fail"], bar: Any) -> None:
        self.count = 0
        """How many were left out."""
        require_choice("on_error", on_error, ("skip", "fail"))
        self._on_error, self._bar = on_error, bar

    def add(self, messages: Sequence[str]) -> None:
        """Take those of the next piece.

        Raises:
            DataError: For the first one, with its place, if ``on_error`` is "fail".
        """
        for message in messages:
            if self._on_error == "fail":
                raise DataError(message)
            self.count += 1
            if self.count <= MAX_REPORTED:
                more = "; more of them are only counted" * (self.count == MAX_REPORTED)
                self._bar.write(f"skipped: {message}{more}", file=sys.stderr)


def format_of(path: str | Path) -> tuple[Literal["json lines", "text", "parquet"], str]:
    """How the documents of a file are stored, by its name.

    Returns:
        One JSON object a line, one document a file, or a table of one document a row; and the suffix of what the whole
        file is compressed by, "" if it is not (a table compresses its columns itself).
    """
    stem, suffix = os.path.splitext(os.fspath(path).lower())
    compression = suffix if suffix in COMPRESSION_SUFFIXES else ""
    suffix = os.path.splitext(stem)[1] if compression else suffix
    if suffix in JSON_LINES_SUFFIXES:
        return "json lines", compression
    return "parquet" if suffix == ".parquet" and not compression else "text", compression


def find_files(inputs: Sequence[str | Path], keys: Sequence[str] = (PLAIN_TEXT_KEY,)) -> list[Path]:
    """The files that ``inputs`` stand for, in document order, each once.

    Args:
        inputs: Files, folders and patterns.
        keys: That will be read; text files have none but ``text``.

    Raises:
        DataError: If an input does not exist or matches nothing, or there is no file in it, or a
            text file has not the key.
        ConfigError: If a file needs a library that is not installed.
    """
    files: dict[str, Path] = {}
    for text in inputs:
        for path in _files_of_input(text):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        content, compression = format_of(path)
        if content == "parquet" or compression == ".zst":
            require_library("pyarrow" if content == "parquet" else "zstandard", f"reading {path}")
        if content == "text" and list(keys) != [PLAIN_TEXT_KEY]:
            raise DataError(f"json keys {', '.join(keys)}: {path} is a text file, which has only '{PLAIN_TEXT_KEY}'")
    return list(files.values())


def require_library(name: str, purpose: str) -> None:
    """Say what to install before anything is read.

    Raises:
        ConfigError: If the optional library ``name`` is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{purpose} needs the library {name}; pip install 'lightning-megatron[data]'")


def progress_bar(files: Sequence[Path], activity: str, delay: float = 0) -> Any:
    """A bar that is told of the bytes read, as stored; 1 MB/s here is 10**6 of them a second."""
    from tqdm import tqdm

    # A log file gets a line every ten seconds, not two a second.
    interval, total = 0.5 if sys.stderr.isatty() else 10, sum(path.stat().st_size for path in files)
    return tqdm(total=total, unit="B", unit_scale=True, desc=activity, mininterval=interval, delay=delay)


def cut_into_pieces(
    files: Sequence[Path], keys: Sequence[str] = (PLAIN_TEXT_KEY,), piece_bytes: int = PIECE_BYTES
) -> Iterator[Piece]:
    """All documents of ``files`` in order, in pieces of about ``piece_bytes``.

    Args:
        files: What ``find_files`` gave.
        keys: Columns to read from tables.
        piece_bytes: Of text; larger where a document is.
    """
    group: list[str] = []
    group_bytes = 0
    for path in files:
        (content, _), size = format_of(path), path.stat().st_size
        if group and (content != "text" or group_bytes + size > piece_bytes):
            yield Piece(files=tuple(group), num_bytes=group_bytes)
            group, group_bytes = [], 0
        if content == "text":
            group.append(str(path))
            group_bytes += size
        elif content == "parquet":
            yield from _rows(str(path), size, keys, piece_bytes)
        else:
            yield from _lines(str(path), size, piece_bytes)
    if group:
        yield Piece(files=tuple(group), num_bytes=group_bytes)


def read_documents(piece: Piece, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The documents of ``piece`` in order, one text a key; and what is no document, with its place and what to do.

    Args:
        piece: What ``cut_into_pieces`` gave.
        keys: Of the JSON objects or rows.
    """
    found = list(_documents(piece, keys))
    bad = [f"{place} {problem}" for place, problem in found if isinstance(problem, str)]
    return [texts for _, texts in found if isinstance(texts, tuple)], bad


def read_texts(path: str, key: str = PLAIN_TEXT_KEY) -> Iterator[tuple[str, str]]:
    """Each text with its place: ``FILE, line N``, ``FILE, row N``, or ``FILE`` where the whole file is one text.

    Args:
        path: A file, a folder or a pattern.
        key: What holds the text in .jsonl and .parquet files.

    Raises:
        DataError: With the place, if something is no text; if a file is missing or cannot be read.
    """
    for piece in cut_into_pieces(find_files([path], [key]), [key]):
        for place, found in _documents(piece, [key]):
            if isinstance(found, str):
                raise DataError(f"{place} {found}")
            yield place, found[0]


def read_records(
    files: Sequence[Path], on_bytes: Callable[[int], object] = lambda _: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object with its place, ``FILE, line N``; blank lines are none.

    Args:
        files: JSON lines, also compressed, whatever their names.
        on_bytes: Is told of progress, in bytes of the files on disk.

    Raises:
        DataError: With the place, if a line is no JSON object; if a file cannot be read.
    """
    for file in files:
        for piece in _lines(str(file), file.stat().st_size, PIECE_BYTES):
            on_bytes(piece.num_bytes)
            for place, record in _records(piece):
                if isinstance(record, str):
                    raise DataError(f"{place} {record}")
                yield place, record


def without_surrogates(text: str) -> str:
    """``text`` with U+FFFD for half characters, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ---- pieces to documents --------------------------------------------------------------------------------------------


def _documents(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    """The place of each document with its texts, one a key; or with what is wrong there and what to do."""
    for path in piece.files:
        yield path, _read_text(path)
    for place, record in _records(piece):
        yield place, record if isinstance(record, str) else _texts_of(record, keys)


def _records(piece: Piece) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The place of each line that is not blank and of each row, with its content or with what is wrong."""
    for number, line in enumerate(piece.lines.split(b"\n"), piece.first):
        if line and not line.isspace():
            yield f"{piece.path}, line {number}", _parse_line(line)
    for number, row in enumerate(piece.rows, piece.first):
        yield f"{piece.path}, row {number}", row
    if piece.problem:
        yield piece.path, piece.problem


def _read_text(path: str) -> tuple[str] | str:
    try:
        data = b"".join(part for part, _ in read_parts(path))
    except OSError as error:
        return _unreadable(error)
    if b"\0" in data:
        return "is not a text file: it contains zero bytes; remove it from the inputs"
    return (data.decode("utf-8-sig", errors="replace"),)


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong and what to do."""
    try:
        record = _loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        return f"is not JSON ({reason}); correct or remove that line"
    if not isinstance(record, dict):
        return f"has the type {type(record).__name__}, not a JSON object; write one object a line"
    return record


def _texts_of(record: dict[str, Any], keys: Sequence[str]) -> tuple[str, ...] | str:
    texts = []
    for key in keys:
        text = record.get(key)
        if key not in record:
            return f"has no key '{key}'; choose the json key from {', '.join(record) or 'none'}"
        if not isinstance(text, str):
            return f"has the type {type(text).__name__} under '{key}', not a string; store text there"
        texts.append(text if text.isascii() else without_surrogates(text))
    return tuple(texts)


def _loads(line: bytes) -> Any:
    """As ``json.loads``, which takes more (NaN, halves of surrogate pairs) and says what is wrong, but is slow."""
    if _orjson is not None:
        with contextlib.suppress(ValueError):
            return _orjson.loads(line)
    return json.loads(line)


# ---- files to pieces ------------------------------------------------------------------------------------------------


def read_parts(path: str | Path, part_bytes: int = PIECE_BYTES) -> Iterator[tuple[bytes, int]]:
    """The content of a file, decompressed, in parts of at most ``part_bytes``, with the bytes of it read until then.

    Members or frames one after the other are one content, as ``cat a.gz b.gz`` makes them.

    Raises:
        OSError: If the file cannot be read, is cut off, has a wrong checksum, or is not compressed so.
    """
    _, compression = format_of(path)
    with open(path, "rb") as stream:
        while not compression and (part := stream.read(part_bytes)):
            yield part, stream.tell()
        current: Any = None
        while data := stream.read(_COMPRESSED_BYTES):
            # gzip files may be padded with zeros, e.g. those on tapes.
            while data := data if current else data.lstrip(b"\0"):
                if current is None:
                    current, failure = _decompressor(compression)
                try:
                    content = current.decompress(data)
                except failure as error:
                    raise OSError(f"damaged, or not compressed as its name says: {error}") from error
                for begin in range(0, len(content), part_bytes):
                    yield content[begin : begin + part_bytes], stream.tell()
                data = current.unused_data if current.eof else b""
                current = None if current.eof else current
        if current is not None:
            raise OSError("it ends in the middle of the compressed data")


def _decompressor(compression: str) -> tuple[Any, type[Exception]]:
    """What decompresses one member or frame, and how it fails."""
    if compression == ".gz":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error  # 16: with gzip's header and checksum
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LONGEST_ZSTD_WINDOW)
    return decompressor.decompressobj(), zstandard.ZstdError


def _lines(path: str, size: int, piece_bytes: int) -> Iterator[Piece]:
    buffer, problem, first, accounted = bytearray(), "", 1, 0
    try:
        for part, position in read_parts(path, piece_bytes):
            buffer += part
            behind_lines = len(part) - part.rfind(b"\n") - 1
            if len(buffer) >= piece_bytes and behind_lines < len(part):
                lines = bytes(buffer[: len(buffer) - behind_lines])
                yield Piece(path=path, lines=lines, first=first, num_bytes=position - accounted)
                del buffer[: len(lines)]
                first, accounted = first + lines.count(b"\n"), position
    except OSError as error:
        problem = _unreadable(error)
        del buffer[buffer.rfind(b"\n") + 1 :]  # the lines that are whole come first
    if buffer or accounted < size:
        yield Piece(path=path, lines=bytes(buffer), first=first, num_bytes=size - accounted, problem=problem)


def _rows(path: str, size: int, keys: Sequence[str], piece_bytes: int) -> Iterator[Piece]:
    """The columns ``keys`` of a table, however large its row groups are: pages are read as they are needed."""
    import pyarrow
    import pyarrow.parquet

    done = accounted = 0
    try:
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as table:
            num_rows, names = table.metadata.num_rows, table.schema_arrow.names
            columns = list(keys) if set(keys) <= set(names) else None  # of all of them the right one can be chosen
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            bytes_a_row = sum(group.total_byte_size for group in groups) // max(num_rows, 1)
            rows = max(1, min(_MOST_ROWS, piece_bytes // max(bytes_a_row, 1)))
            for batch in table.iter_batches(rows, columns=columns, use_threads=False):
                first, done = done + 1, done + batch.num_rows
                before, accounted = accounted, size * done // num_rows
                yield Piece(path=path, rows=batch.to_pylist(), first=first, num_bytes=accounted - before)
    # What damaged pages raise is an OSError, too; what is no UTF-8 is another.
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        yield Piece(path=path, num_bytes=size - accounted, problem=_unreadable(error))


def _unreadable(error: Exception) -> str:
    reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0].rstrip(".")
    return f"cannot be read ({reason}); make or fetch it again, allow access, or remove it from the inputs"


# ---- inputs to files ------------------------------------------------------------------------------------------------


def _files_of_input(text: str | Path) -> list[Path]:
    path = os.path.expanduser(text)
    matches = [path]
    if glob.has_magic(str(path)) and not os.path.exists(path):
        matches = sorted(glob.glob(str(path), recursive=True))
    files = [file for match in matches for file in (_files_of_folder(match) if os.path.isdir(match) else [Path(match)])]
    if not files:
        raise DataError(f"{path} matches no file, or holds no .jsonl, .parquet, .txt or source file; name others")
    for file in files:
        # Unlike its namesake in pathlib, this raises nothing for what cannot be looked up or is too long for a name.
        if not os.path.isfile(file):
            raise DataError(f"{file} does not exist, or is no file; give an existing file, folder or pattern")
    return files


def _files_of_folder(folder: str | Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:  # its documents would be missing, and nobody would know
        raise DataError(f"{error.filename} cannot be searched ({error.strerror}); allow access") from error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        found += [Path(parent, name) for name in names if _is_taken_from_folder(name)]
    return sorted((path for path in found if os.path.isfile(path)), key=lambda path: path.parts)


def _is_taken_from_folder(name: str) -> bool:
    content, compression = format_of(name)
    suffix = os.path.splitext(name.lower().removesuffix(compression))[1]
    is_known = content == "parquet" or suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES
    return is_known and not name.startswith(".")
