"""Which files do the inputs stand for, in which order, and how is each one stored?

One rule for the tokenizer's training and for preprocessing:

* a folder is searched recursively; it gives its ``.jsonl`` and ``.parquet`` files and the text files named in
  ``TEXT_SUFFIXES``, compressed ones (``.gz``, ``.zst``) too, except hidden ones and those in hidden folders and in
  ``SKIPPED_FOLDERS``; links to files are followed, links to folders are not;
* a pattern with ``*``, ``?`` or ``[`` gives every file that it matches (``**`` crosses folders) and searches matched
  folders as above;
* a file named by itself is always taken: ``.jsonl`` and ``.json`` hold one JSON object a line, ``.parquet`` a table,
  anything else is text.

Inputs keep the order in which they are given, files within an input are sorted by path, and a file reached twice counts
once, so the same inputs give the same documents in the same order on every machine.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from lightning_megatron.errors import ConfigError, DataError

JSON_LINES_SUFFIXES = (".jsonl", ".json")
"""Suffixes of files with one JSON object a line; a folder search takes only the first."""

PARQUET_SUFFIX = ".parquet"

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

INSTALL_DATA = "pip install 'lightning-megatron[data]'"
"""What brings the libraries that only some inputs and options need."""


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """How documents are stored in a file."""

    content: Literal["json lines", "text", "parquet"]
    """One JSON object a line, one document a file, or a table of one document a row."""
    compression: Literal["", ".gz", ".zst"]
    """By which the whole file is compressed; a table compresses its columns itself."""


def format_of(path: str | Path) -> FileFormat:
    """The format that the name of a file says."""
    stem, suffix = os.path.splitext(str(path).lower())
    compression: Literal["", ".gz", ".zst"] = ""
    if suffix in COMPRESSION_SUFFIXES:
        compression = ".gz" if suffix == ".gz" else ".zst"
        suffix = os.path.splitext(stem)[1]
    if suffix in JSON_LINES_SUFFIXES:
        return FileFormat(content="json lines", compression=compression)
    if suffix == PARQUET_SUFFIX and not compression:
        return FileFormat(content="parquet", compression="")
    return FileFormat(content="text", compression=compression)


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
    _require_libraries(list(files.values()))
    return list(files.values())


def check_keys(files: Sequence[Path], keys: Sequence[str]) -> None:
    """Text files have no keys.

    Raises:
        DataError: If other keys than ``text`` are asked of a text file.
    """
    if list(keys) == [PLAIN_TEXT_KEY]:
        return
    for path in files:
        if format_of(path).content == "text":
            raise DataError(
                f"json keys {', '.join(keys)} cannot be read from {path}: a text file has only the key"
                f" '{PLAIN_TEXT_KEY}'; give .jsonl or .parquet files, or leave --json-keys out"
            )


def require_library(name: str, purpose: str) -> None:
    """Say what to install before anything is read.

    Raises:
        ConfigError: If the optional library ``name`` is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{purpose} needs the library {name}, which is not installed; {INSTALL_DATA}")


def _require_libraries(files: Sequence[Path]) -> None:
    for path in files:
        form = format_of(path)
        if form.content == "parquet":
            require_library("pyarrow", f"reading {path}")
        elif form.compression == ".zst":
            require_library("zstandard", f"reading {path}")


def _files_of_input(text: str | Path) -> list[Path]:
    if not os.fspath(text):
        raise DataError("input='' is empty; give a file, folder or pattern, or . for this folder")
    # Unlike their namesakes in pathlib, these raise nothing for what cannot be looked up or is too long for a name.
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = _files_of_folder(path)
        if not files:
            raise DataError(
                f"{path} holds no .jsonl, .parquet, .txt or source file; name files with other suffixes singly or by"
                " a pattern"
            )
        return files
    if not glob.has_magic(str(path)):
        raise _not_a_file(path)
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [file for match in matches for file in (_files_of_folder(match) if match.is_dir() else [match])]
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
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSION_SUFFIXES:
        suffix = os.path.splitext(stem)[1]
    elif suffix == PARQUET_SUFFIX:
        return not name.startswith(".")
    return not name.startswith(".") and (suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES)
