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
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from lightning_megatron.errors import ConfigError, DataError

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
_SURROGATE = re.compile("[\ud800-\udfff]")
_JSON_TYPES: dict[type, str] = {
    **{type(None): "null", bool: "a boolean", int: "a number", float: "a number"},
    **{str: "a string", list: "an array", dict: "an object"},
}


class FileFormat(NamedTuple):
    """How documents are stored in a file."""

    content: Literal["json lines", "text", "parquet"]
    """One JSON object a line, one document a file, or a table of one document a row."""
    compression: str
    """The suffix of what the whole file is compressed by, "" if it is not; a table compresses its columns itself."""


class UnreadableFileError(Exception):
    """A file that is damaged or cannot be read; the message goes on after its name, and says what to do."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one process turns into tokens; only one kind of content is there."""

    path: str
    """The file; of several text files, none."""
    num_bytes: int
    """Input bytes that it stands for, as stored; over all pieces of a file, its size."""
    files: tuple[str, ...] = ()
    """Whole files of one document each, plain or compressed."""
    lines: bytes = b""
    """Whole lines; only the last one of a file may lack its newline."""
    columns: tuple[list[str | None], ...] = ()
    """Some rows of a table: one list for each key, all of the same length; None where there is no text."""
    first: int = 1
    """Number of the first line or row in its file."""
    problem: str = ""
    """Why the rest of the file cannot be read; it fails where its documents would have come."""


@dataclass(kw_only=True)
class PieceDocuments:
    """What was found in a piece."""

    documents: list[tuple[str, ...]] = field(default_factory=list)
    """One text a key."""
    bad: list[str] = field(default_factory=list)
    """Where in the input something is no document, why, and what to do: the first ones."""
    num_bad: int = 0
    """How many there are."""


class BadDocuments:
    """Counts and reports what is no document, in input order.

    Args:
        on_error: "fail" ends the run at the first one, "skip" leaves it out.
        report: Prints a line.
    """

    def __init__(self, on_error: Literal["skip", "fail"], report: Callable[[str], None]) -> None:
        self.count = 0
        """How many were left out."""
        self._on_error = on_error
        self._report = report

    def add(self, found: PieceDocuments) -> None:
        """Take those of the next piece.

        Raises:
            DataError: For the first one, with its place, if ``on_error`` is "fail".
        """
        for message in found.bad:
            if self._on_error == "fail":
                raise DataError(message)
            self.count += 1
            if self.count <= MAX_REPORTED:
                self._report(f"skipped: {message}")
            if self.count == MAX_REPORTED:
                self._report("skipped: more of them are only counted")
        self.count += found.num_bad - len(found.bad)


def format_of(path: str | Path) -> FileFormat:
    """How the documents of a file are stored, by its name."""
    stem, suffix = os.path.splitext(os.fspath(path).lower())
    compression = suffix if suffix in COMPRESSION_SUFFIXES else ""
    suffix = os.path.splitext(stem)[1] if compression else suffix
    if suffix in JSON_LINES_SUFFIXES:
        return FileFormat("json lines", compression)
    return FileFormat("parquet" if suffix == ".parquet" and not compression else "text", compression)


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that ``inputs`` stand for, in document order, each once.

    Args:
        inputs: Files, folders and patterns.

    Raises:
        DataError: If there are no inputs, an input does not exist or matches nothing, or there is no file in it.
        ConfigError: If a file needs a library that is not installed.
    """
    if not inputs:
        raise DataError("no input path was given; name at least one file, folder or pattern with --input")
    files: dict[str, Path] = {}
    for text in inputs:
        for path in _files_of_input(text):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        form = format_of(path)
        if form.content == "parquet":
            require_library("pyarrow", f"reading {path}")
        elif form.compression == ".zst":
            require_library("zstandard", f"reading {path}")
    return list(files.values())


def check_keys(files: Sequence[Path], keys: Sequence[str]) -> None:
    """Text files have no keys.

    Raises:
        DataError: If other keys than ``text`` are asked of a text file.
    """
    for path in files if list(keys) != [PLAIN_TEXT_KEY] else ():
        if format_of(path).content == "text":
            raise DataError(
                f"json keys {', '.join(keys)} cannot be read from {path}: a text file has only the key"
                f" '{PLAIN_TEXT_KEY}'; give .jsonl or .parquet files, or leave the json key out"
            )


def require_library(name: str, purpose: str) -> None:
    """Say what to install before anything is read.

    Raises:
        ConfigError: If the optional library ``name`` is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"{purpose} needs the library {name}, which is not installed; pip install 'lightning-megatron[data]'"
        )


def read_parts(path: str | Path, part_bytes: int = PIECE_BYTES) -> Iterator[tuple[bytes, int]]:
    """The content of a file, decompressed, in parts of at most ``part_bytes``, with the bytes of it read until then.

    Members or frames one after the other are one content, as ``cat a.gz b.gz`` makes them.

    Raises:
        UnreadableFileError: If the file cannot be read, is cut off, has a wrong checksum, or is not compressed so.
    """
    compression = format_of(path).compression
    try:
        with open(path, "rb") as stream:
            while not compression and (part := stream.read(part_bytes)):
                yield part, stream.tell()
            current: Any = None
            while data := stream.read(_COMPRESSED_BYTES):
                while data:
                    if current is None:
                        # gzip files may be padded with zeros, e.g. those on tapes.
                        data = data.lstrip(b"\0") if compression == ".gz" else data
                        if not data:
                            break
                        current, failures = _decompressor(compression)
                    try:
                        content = current.decompress(data)
                    except failures as error:
                        raise UnreadableFileError(
                            f"is damaged, or not compressed as its name says ({error}); make or fetch it again, or"
                            " remove it"
                        ) from error
                    for begin in range(0, max(len(content), 1), part_bytes):
                        yield content[begin : begin + part_bytes], stream.tell()
                    data = current.unused_data if current.eof else b""
                    current = None if current.eof else current
            if current is not None:
                raise UnreadableFileError(
                    "ends in the middle of the compressed data: cut off; make or fetch it again, or remove it"
                )
    except OSError as error:
        raise _no_access(error) from error


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
        content, size = format_of(path).content, path.stat().st_size
        if group and (content != "text" or group_bytes + size > piece_bytes):
            yield Piece(path="", files=tuple(group), num_bytes=group_bytes)
            group, group_bytes = [], 0
        if content == "text":
            group.append(str(path))
            group_bytes += size
            continue
        done = 0
        table = content == "parquet"
        try:
            for piece in _rows(str(path), size, keys, piece_bytes) if table else _lines(str(path), piece_bytes):
                done += piece.num_bytes
                yield piece
        except UnreadableFileError as error:
            yield Piece(path=str(path), num_bytes=size - done, problem=str(error))
    if group:
        yield Piece(path="", files=tuple(group), num_bytes=group_bytes)


def read_documents(piece: Piece, keys: Sequence[str], stop_at_bad: bool = True) -> PieceDocuments:
    """The documents of ``piece`` in order.

    Args:
        piece: What ``cut_into_pieces`` gave.
        keys: Of the JSON objects; a table's batches have been cut for them already.
        stop_at_bad: Leave out everything after the first bad document, as it ends the run.
    """
    found = PieceDocuments()
    for place, document in _documents(piece, keys):
        if isinstance(document, tuple):
            found.documents.append(document)
            continue
        found.num_bad += 1
        if len(found.bad) < MAX_REPORTED:
            found.bad.append(f"{place} {document}")
        if stop_at_bad:
            break
    return found


def read_texts(path: str, key: str = PLAIN_TEXT_KEY) -> Iterator[tuple[str, str]]:
    """Each text with its place: ``FILE, line N``, ``FILE, row N``, or ``FILE`` where the whole file is one text.

    Args:
        path: A file, a folder or a pattern.
        key: What holds the text in .jsonl and .parquet files.

    Raises:
        DataError: With the place, if something is no text; if a file is missing or cannot be read.
    """
    files = find_files([path])
    check_keys(files, [key])
    for piece in cut_into_pieces(files, [key]):
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
        try:
            for piece in _lines(str(file), PIECE_BYTES):
                on_bytes(piece.num_bytes)
                for place, line in _numbered(piece):
                    record = _parse_line(line)
                    if isinstance(record, str):
                        raise DataError(f"{place} {record}")
                    yield place, record
        except UnreadableFileError as error:
            raise DataError(f"{file} {error}") from error


def _documents(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...] | str]]:
    """The place of each document with its texts, one a key; or with what is wrong there and what to do."""
    for path in piece.files:
        yield path, _read_text(path)
    for place, line in _numbered(piece):
        record = _parse_line(line)
        yield place, record if isinstance(record, str) else _texts_of(record, keys)
    for number, row in enumerate(zip(*piece.columns, strict=True), piece.first):
        problem = f"has no text under '{keys[row.index(None)]}': null, or not UTF-8" if None in row else ""
        yield f"{piece.path}, row {number}", f"{problem}; store text there or remove that row" if problem else row
    if piece.problem:
        yield piece.path, piece.problem


def _numbered(piece: Piece) -> Iterator[tuple[str, bytes]]:
    """The lines of a piece that are not blank, with their places."""
    for number, line in enumerate(piece.lines.split(b"\n"), piece.first):
        if line and not line.isspace():
            yield f"{piece.path}, line {number}", line


def _read_text(path: str) -> tuple[str] | str:
    try:
        data = b"".join(part for part, _ in read_parts(path))
    except UnreadableFileError as error:
        return str(error)
    if b"\0" in data:
        return "is not a text file: it contains zero bytes; remove it from the inputs"
    return (data.decode("utf-8-sig", errors="replace"),)


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong and what to do."""
    try:
        record = _loads(line)
    except (ValueError, RecursionError) as error:
        reason = "its bytes are not UTF-8" if isinstance(error, UnicodeError) else str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        return f"is not JSON ({reason}); correct or remove that line"
    if not isinstance(record, dict):
        return f"holds {_JSON_TYPES[type(record)]}, not a JSON object; write one object a line"
    return record


def _texts_of(record: dict[str, Any], keys: Sequence[str]) -> tuple[str, ...] | str:
    texts = []
    for key in keys:
        text = record.get(key)
        if key not in record:
            return f"has no key '{key}'; choose the json key from {', '.join(record) or 'none'}"
        if not isinstance(text, str):
            return f"has {_JSON_TYPES[type(text)]} under '{key}', not a string; store text there"
        texts.append(text if text.isascii() else without_surrogates(text))
    return tuple(texts)


def without_surrogates(text: str) -> str:
    """``text`` with U+FFFD for half characters, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def _loads(line: bytes) -> Any:
    """As ``json.loads``, which takes more (NaN, halves of surrogate pairs) and says what is wrong, but is slow."""
    if _orjson is not None:
        with contextlib.suppress(ValueError):
            return _orjson.loads(line)
    return json.loads(line)


def _lines(path: str, piece_bytes: int) -> Iterator[Piece]:
    parts: list[bytes] = []
    held = accounted = position = 0
    first = 1
    try:
        for part, position in read_parts(path, min(piece_bytes, PIECE_BYTES)):
            held += len(part)
            cut = part.rfind(b"\n") + 1
            if held < piece_bytes or cut == 0:
                parts.append(part)
                continue
            lines = b"".join((*parts, part[:cut]))
            yield Piece(path=path, lines=lines, first=first, num_bytes=position - accounted)
            first += lines.count(b"\n")
            parts, accounted = [part[cut:]], position
            held = len(parts[0])
    except UnreadableFileError:
        # The lines that are whole come first.
        whole, newline, _ = b"".join(parts).rpartition(b"\n")
        yield Piece(path=path, lines=whole + newline, first=first, num_bytes=position - accounted)
        raise
    if held or position > accounted:
        yield Piece(path=path, lines=b"".join(parts), first=first, num_bytes=position - accounted)


def _rows(path: str, size: int, keys: Sequence[str], piece_bytes: int) -> Iterator[Piece]:
    """The columns ``keys`` of a table, however large its row groups are: pages are read as they are needed."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        ) as table:
            _require_text_columns(table.schema_arrow, keys)
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            columns = [group.column(index) for group in groups for index in range(group.num_columns)]
            text_bytes = sum(each.total_uncompressed_size for each in columns if each.path_in_schema in keys)
            num_rows, done = table.metadata.num_rows, 0
            rows = max(1, min(_MOST_ROWS, piece_bytes * num_rows // max(text_bytes, 1)))
            for batch in table.iter_batches(rows, columns=list(keys), use_threads=False):
                before, done = done, done + batch.num_rows
                yield Piece(
                    path=path,
                    columns=tuple([_text(value) for value in batch.column(key)] for key in keys),
                    first=before + 1,
                    num_bytes=size * done // num_rows - size * before // num_rows,
                )
    # OSError is what damaged pages raise, as well as a disk that fails; one without a number is the former.
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise _no_access(error) from error
        reason = str(error).splitlines()[0].rstrip(".")
        raise UnreadableFileError(
            f"is damaged, or no Parquet file ({reason}); make or fetch it again, or remove it"
        ) from error


def _require_text_columns(schema: Any, keys: Sequence[str]) -> None:
    from pyarrow.types import is_dictionary

    for key in keys:
        if (count := schema.names.count(key)) != 1:
            present = ", ".join(schema.names) or "none"
            raise UnreadableFileError(f"has {count or 'no'} column '{key}'; choose the json key from {present}")
        kind = schema.field(key).type
        value = kind.value_type if is_dictionary(kind) else kind
        if str(value) not in ("string", "large_string", "string_view"):
            raise UnreadableFileError(f"has a column '{key}' of type {kind}, not of strings; store text there")


def _text(value: Any) -> str | None:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError:
        return None
    return text


def _decompressor(compression: str) -> tuple[Any, type[Exception]]:
    """What decompresses one member or frame, and how it fails."""
    if compression == ".gz":
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error  # 16: with gzip's header and checksum
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LONGEST_ZSTD_WINDOW)
    return decompressor.decompressobj(), zstandard.ZstdError


def _no_access(error: OSError) -> UnreadableFileError:
    return UnreadableFileError(f"cannot be read ({error.strerror}); remove it from the inputs or allow access")


def _files_of_input(text: str | Path) -> list[Path]:
    if not os.fspath(text):
        raise DataError("input='' is empty; give a file, folder or pattern, or . for this folder")
    # Unlike their namesakes in pathlib, these raise nothing for what cannot be looked up or is too long for a name.
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        files = _files_of_folder(path)
        if not files:
            raise DataError(
                f"{path} holds no .jsonl, .parquet, .txt or source file; name files with other suffixes singly or by"
                " a pattern"
            )
        return files
    matches = [path]
    if glob.has_magic(str(path)) and not os.path.isfile(path):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [file for match in matches for file in (_files_of_folder(match) if os.path.isdir(match) else [match])]
    if not files:
        raise DataError(f"{path} matches no file; check the pattern, and quote it so that the shell leaves it alone")
    for file in files:
        if not os.path.isfile(file):
            raise _not_a_file(file)
    return files


def _not_a_file(path: Path) -> DataError:
    """Why there is nothing to read at ``path``."""
    try:
        path.stat()
    except FileNotFoundError:
        return DataError(f"{path} does not exist; give an existing file, folder or pattern as input")
    except OSError as error:
        return DataError(f"{path} cannot be read ({error.strerror}); give an input that can be")
    return DataError(f"{path} is neither a file nor a folder; write what comes out of it to a file, and give that")


def _refuse_folder(error: OSError) -> NoReturn:
    """Its documents would be missing, and nobody would know."""
    raise DataError(
        f"{error.filename} cannot be searched ({error.strerror}); allow access, or name the other inputs singly"
    ) from error


def _files_of_folder(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        found += [Path(parent, name) for name in names if _is_taken_from_folder(name)]
    return sorted((path for path in found if os.path.isfile(path)), key=lambda path: path.parts)


def _is_taken_from_folder(name: str) -> bool:
    content, compression = format_of(name)
    suffix = os.path.splitext(name.lower().removesuffix(compression))[1]
    is_known = content == "parquet" or suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES
    return is_known and not name.startswith(".")
