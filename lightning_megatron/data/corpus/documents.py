"""Which documents come out of which input paths?

One rule for the tokenizer's training and for preprocessing:

* a folder is searched recursively; it gives its ``.jsonl`` files and the text files named in ``TEXT_SUFFIXES``, except
  hidden ones and those in hidden folders and in ``SKIPPED_FOLDERS``;
* a pattern with ``*``, ``?`` or ``[`` gives every file that it matches (``**`` crosses folders) and searches matched
  folders as above;
* a file named by itself is always taken: ``.jsonl`` and ``.json`` hold one JSON object a line, anything else is text.

A text file is one document. Inputs keep the order in which they are given, files within an input are sorted by path,
and a file reached twice counts once, so the same inputs give the same documents in the same order on every machine.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.errors import DataError

JSON_LINES_SUFFIXES = (".jsonl", ".json")
"""Suffixes of files with one JSON object a line; a folder search takes only the first."""

TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".sh", ".sql")
    + (".py", ".pyi", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala")
    + (".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".r", ".jl", ".lua", ".pl")
)
"""Suffixes, lower case, of the text and source files that a folder search takes."""

SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "node_modules"))
"""Folders that a folder search leaves out: caches, and packages installed into a source tree. Name them to get them."""

PIECE_BYTES = 1 << 20
"""Work is handed out in pieces of about this many input bytes."""

PLAIN_TEXT_KEY = "text"
"""The key under which the content of a text file appears, as if it were a JSON line."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one worker reads: whole text files, or the lines that begin in a byte range."""

    paths: tuple[str, ...]
    """Files; exactly one if it is a JSON-lines file."""
    start: int
    """First byte, for a JSON-lines file."""
    stop: int
    """Lines that begin at or after this byte belong to the next piece; for a JSON-lines file."""
    is_json_lines: bool
    """Which of the two kinds it is."""
    num_bytes: int
    """Input bytes that it stands for, for progress bars."""


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that ``inputs`` stand for, in document order, each once.

    Args:
        inputs: Files, folders and patterns.

    Raises:
        DataError: If there are no inputs, an input does not exist or matches nothing, or there is no file in it.
    """
    if not inputs:
        raise DataError("no input path was given; name at least one file, folder or pattern with --input")
    files: dict[str, Path] = {}
    for text in inputs:
        for path in _files_of_input(text):
            files.setdefault(os.path.realpath(path), path)
    return list(files.values())


def cut_into_pieces(files: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The same documents in the same order, in pieces of about ``piece_bytes`` that can be read independently."""
    group: list[str] = []
    group_bytes = 0
    for path in files:
        size = path.stat().st_size
        if _is_json_lines(path) or group_bytes + size > piece_bytes:
            if group:
                yield _text_piece(group, group_bytes)
            group, group_bytes = [], 0
        if _is_json_lines(path):
            for start in range(0, size, piece_bytes):
                stop = min(start + piece_bytes, size)
                yield Piece(paths=(str(path),), start=start, stop=stop, is_json_lines=True, num_bytes=stop - start)
        else:
            group.append(str(path))
            group_bytes += size
    if group:
        yield _text_piece(group, group_bytes)


def read_documents(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One tuple of texts, in the order of ``keys``, for each document of ``piece``.

    Bytes of a text file that are not UTF-8 become U+FFFD, as source trees contain a few such files.

    Raises:
        DataError: With file and line, for a line that is not a JSON object with the text keys, and for a binary file;
            or if other keys than ``text`` are asked of a text file.
    """
    if piece.is_json_lines:
        yield from _read_json_lines(piece, keys)
        return
    for path in piece.paths:
        if list(keys) != [PLAIN_TEXT_KEY]:
            raise DataError(
                f"json keys {', '.join(keys)} cannot be read from {path}: a text file has only the key"
                f" '{PLAIN_TEXT_KEY}'; give .jsonl files, or leave --json-keys out"
            )
        yield (_read_text(path),)


def _files_of_input(text: str | Path) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _files_of_folder(path)
        if not files:
            raise DataError(
                f"{path} holds no .jsonl, .txt or source file; name files with other suffixes singly or by a pattern"
            )
        return files
    if not glob.has_magic(str(path)):
        raise DataError(f"{path} does not exist; give an existing file, folder or pattern as input")
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [file for match in matches for file in (_files_of_folder(match) if match.is_dir() else [match])]
    if not files:
        raise DataError(f"{path} matches no file; check the pattern, and quote it so that the shell leaves it alone")
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        found += [Path(parent, name) for name in names if _is_taken_from_folder(name)]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def _is_taken_from_folder(name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return not name.startswith(".") and (suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES)


def _is_json_lines(path: Path) -> bool:
    return path.suffix.lower() in JSON_LINES_SUFFIXES


def _text_piece(paths: list[str], num_bytes: int) -> Piece:
    return Piece(paths=tuple(paths), start=0, stop=0, is_json_lines=False, num_bytes=num_bytes)


def _read_text(path: str) -> str:
    data = _read_bytes(path)
    if b"\0" in data:
        raise DataError(f"{path} is not a text file: it contains zero bytes; remove it from the inputs")
    return data.decode("utf-8", errors="replace")


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_json_lines(piece: Piece, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    (path,) = piece.paths
    try:
        with open(path, "rb") as stream:
            # A line belongs to the piece in which it begins: one that was begun before is finished by the piece before.
            if piece.start:
                stream.seek(piece.start - 1)
                stream.readline()
            while (begin := stream.tell()) < piece.stop:
                line = stream.readline()
                if line.strip():
                    yield _parse_line(line, keys, path, begin)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse_line(line: bytes, keys: Sequence[str], path: str, begin: int) -> tuple[str, ...]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _bad_line(path, begin, f"is not JSON ({error})", "correct or remove that line") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise _bad_line(path, begin, f"holds a {kind}, not a JSON object", 'write {"text": ...}')
    for key in keys:
        if key not in record:
            present = ", ".join(map(str, record)) or "none"
            raise _bad_line(path, begin, f"has no key '{key}'", f"choose --json-keys from {present}")
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise _bad_line(path, begin, f"has a {kind} under '{key}', not a string", "store text there")
    return tuple(record[key] for key in keys)


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read ({error.strerror}); remove it from the inputs or allow access")


def _bad_line(path: str, begin: int, problem: str, fix: str) -> DataError:
    with open(path, "rb") as stream:
        number = 1 + stream.read(begin).count(b"\n")
    return DataError(f"{path}, line {number} {problem}; {fix}")
