"""Find the files of a corpus: JSON lines, Parquet tables and text files, plain, gzip or zstd.

A directory is searched recursively for ``.jsonl`` and ``.parquet`` files and the text files named in
``TEXT_SUFFIXES``, compressed ones (``.gz``, ``.zst``) too, except hidden ones and those in hidden directories and in
``SKIPPED_FOLDERS``; links to files are followed (one to nothing is an error), links to directories are not. A pattern
with ``*``, ``?`` or ``[`` gives every file that it matches (``**`` crosses directories) and searches matched
directories likewise. A file named explicitly is always read. Inputs keep the order in which they are given, files
within an input are sorted by path, and duplicates are dropped, so the same inputs give the same documents in the same
order on every machine.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from tqdm import tqdm

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.rank_zero import rank_zero_warn

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
_UNREAD_SUFFIXES = (
    ".json.gz",
    ".json.zst",
    ".bz2",
    ".xz",
    ".lz4",
    ".zip",
    ".tar",
    ".csv",
    ".tsv",
    ".arrow",
)
"""Suffixes of files that may hold documents, too, and that a directory search leaves out, with a warning; plain .json
files are mostly settings."""
PLAIN_TEXT_KEY = "text"
"""Key of a text file's content, as if it were a JSON line."""


def format_of(path: str | Path) -> tuple[Literal["json lines", "text", "parquet"], str]:
    """Format and compression of a file, by its name.

    Returns:
        The format: one JSON object per line, one document per file, or one table row per document; and the suffix of
        the compression of the whole file, "" if there is none (Parquet compresses columns itself).
    """
    stem, suffix = os.path.splitext(os.fspath(path).lower())
    compression = ""
    if suffix in COMPRESSION_SUFFIXES:
        compression = suffix
        _, suffix = os.path.splitext(stem)
    if suffix in JSON_LINES_SUFFIXES:
        return "json lines", compression
    if suffix == ".parquet" and not compression:
        return "parquet", compression
    return "text", compression


def find_files(
    inputs: Sequence[str | Path],
    keys: Sequence[str] = (PLAIN_TEXT_KEY,),
) -> list[Path]:
    """Files named by ``inputs``, in document order, without duplicates.

    Args:
        inputs: Files, directories and patterns.
        keys: Keys to be read; text files have only ``text``.

    Raises:
        DataError: If an input does not exist, comes twice, matches or contains no file, or a text file lacks the key.
        ConfigError: If reading a file needs a library that is not installed.
    """
    files: dict[str, Path] = {}
    for item, count in Counter(str(each) for each in inputs).items():
        if count > 1:
            raise DataError(
                f"{item} is given {count} times: expected each input once, as each file is read once; give it once, "
                "and a weight in the data module to read it more often"
            )
        for path in _files_of_input(item):
            files.setdefault(os.path.realpath(path), path)
    for path in files.values():
        content, compression = format_of(path)
        if content == "parquet":
            require_library("pyarrow", f"reading {path}")
        elif compression == ".zst":
            require_library("zstandard", f"reading {path}")
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


def input_progress(
    files: Sequence[Path],
    activity: str,
    delay: float = 0,
) -> Any:
    """A tqdm progress bar over the stored bytes of ``files``; 1 MB/s is 10**6 bytes per second."""
    return tqdm(
        total=sum(path.stat().st_size for path in files),
        unit="B",
        unit_scale=True,
        desc=activity,
        # A log file gets one line every ten seconds, a terminal two updates per second.
        mininterval=0.5 if sys.stderr.isatty() else 10,
        delay=delay,
    )


def _files_of_input(item: str | Path) -> list[Path]:
    path = os.path.expanduser(item)
    matches = [path]
    if glob.has_magic(str(path)) and not os.path.exists(path):
        matches = sorted(glob.glob(str(path), recursive=True))
    files: list[Path] = []
    for match in matches:
        files += _files_of_folder(match) if os.path.isdir(match) else [Path(match)]
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
    unread: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if _is_searched(name))
        for name in names:
            path = Path(parent, name)
            if not _is_document_file(name):
                if name.lower().endswith(_UNREAD_SUFFIXES) and not name.startswith("."):
                    unread.append(path)
                continue
            if path.is_symlink() and not os.path.exists(path):
                raise DataError(
                    f"{path}: expected a link to a file, got one to {os.readlink(path)}, which is not there; restore "
                    "it, or remove the link"
                )
            if os.path.isfile(path):
                paths.append(path)
    if paths and unread:
        rank_zero_warn(
            f"{folder}: {len(unread)} files are left out, such as {min(unread)}: a directory is searched for .jsonl, "
            ".parquet and text files, also .gz and .zst; name others, or convert them"
        )
    return sorted(paths, key=lambda path: path.parts)


def _is_searched(folder: str) -> bool:
    return not folder.startswith(".") and folder not in SKIPPED_FOLDERS


def _is_document_file(name: str) -> bool:
    if name.startswith("."):
        return False
    content, compression = format_of(name)
    _, suffix = os.path.splitext(name.lower().removesuffix(compression))
    return content == "parquet" or suffix == JSON_LINES_SUFFIXES[0] or suffix in TEXT_SUFFIXES
