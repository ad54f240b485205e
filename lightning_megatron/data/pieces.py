"""Pieces of a corpus, of similar size, that worker processes tokenize independently.

JSON lines and tables are read by the process that cuts, which is a hundred times faster than tokenizing: one large file
feeds all workers, compressed or not. Text files are only named in a piece, and opened by the worker that tokenizes
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.data.input_files import format_of

PIECE_BYTES = 1 << 19
"""Approximate size of a piece, in decompressed bytes: repetitive lines grow ten thousandfold when decompressed, and no
piece may be that large."""
MIN_LARGEST_DOCUMENT = 1 << 20
MAX_LARGEST_DOCUMENT = 1 << 30
MAX_DOCUMENT_EXPANSION = 20
"""Default limit of a document in a compressed file: so many times the size of the file, between these two limits. A few
kilobytes can decompress to one document of gigabytes."""


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
    limit = max(MIN_LARGEST_DOCUMENT, MAX_DOCUMENT_EXPANSION * size)
    return min(limit, MAX_LARGEST_DOCUMENT)


def too_long(limit: int) -> str:
    """Problem of a document that is longer than ``limit``, and its fix."""
    return (
        f"is longer than {limit:,} bytes, the limit for a file of this size; set max_document_bytes if it is meant to "
        "be, or remove it from the inputs"
    )


def read_failure(error: Exception) -> str:
    """Problem of a file that cannot be read, and its fix."""
    text: str = getattr(error, "strerror", None) or str(error)
    reason = text.splitlines()[0].rstrip(".")
    return f"cannot be read ({reason}); create or download it again, allow access, or remove it from the inputs"
