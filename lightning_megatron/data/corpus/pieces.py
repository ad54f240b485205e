"""How is the input cut into pieces of work, all alike in size, that workers turn into tokens independently?

What can be cut without reading it is only named: byte ranges of plain files. Compressed files and tables are read here,
in one process, and handed out: that is a hundred times faster than tokenizing, and one large file feeds all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_megatron.data.corpus.compressed import DamagedFileError, decompress
from lightning_megatron.data.corpus.files import PLAIN_TEXT_KEY, format_of
from lightning_megatron.data.corpus.parquet import UnsuitableTableError, read_batches

PIECE_BYTES = 1 << 19
"""Work is handed out in pieces of about this many bytes of text."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one worker turns into tokens."""

    num_bytes: int
    """Input bytes that it stands for, as stored; over all pieces of a file, its size."""
    path: str = ""
    """The file; of several text files, none."""


@dataclass(frozen=True, kw_only=True)
class TextFiles(Piece):
    """Whole files of one document each."""

    paths: tuple[str, ...]
    """Plain or compressed."""


@dataclass(frozen=True, kw_only=True)
class LineRange(Piece):
    """The lines that begin in a byte range of a plain file."""

    start: int
    """First byte of the range."""
    stop: int
    """Lines that begin at or after this byte belong to the next piece."""


@dataclass(frozen=True, kw_only=True)
class LineBlock(Piece):
    """Some lines of a compressed file."""

    lines: bytes
    """Whole lines; only the last one of the file may lack its newline."""


@dataclass(frozen=True, kw_only=True)
class RowBatch(Piece):
    """Some rows of a table."""

    columns: tuple[list[str | None], ...]
    """One list for each key, all of the same length; None where there is no text."""


@dataclass(frozen=True, kw_only=True)
class UnreadableFile(Piece):
    """The rest of a file that cannot be read; it fails where its documents would have come."""

    problem: str
    """What is wrong."""
    fix: str
    """What to do."""


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
        is_text = format_of(path).content == "text"
        size = path.stat().st_size
        if group and (not is_text or group_bytes + size > piece_bytes):
            yield TextFiles(paths=tuple(group), num_bytes=group_bytes)
            group, group_bytes = [], 0
        if is_text:
            group.append(str(path))
            group_bytes += size
        else:
            yield from _pieces_of_file(str(path), size, keys, piece_bytes)
    if group:
        yield TextFiles(paths=tuple(group), num_bytes=group_bytes)


def _pieces_of_file(path: str, size: int, keys: Sequence[str], piece_bytes: int) -> Iterator[Piece]:
    """The pieces of a file of many documents; what of it cannot be read is a piece, too."""
    form = format_of(path)
    done = 0
    if form.content == "parquet":
        pieces = _row_batches(path, size, keys, piece_bytes)
    elif form.compression:
        pieces = _line_blocks(path, form.compression, piece_bytes)
    else:
        pieces = _line_ranges(path, size, piece_bytes)
    problem, fix = "", ""
    try:
        for piece in pieces:
            done += piece.num_bytes
            yield piece
    except DamagedFileError as error:
        problem, fix = str(error), "make or fetch it again, or remove it"
    except UnsuitableTableError as error:
        problem, fix = error.problem, error.fix
    except OSError as error:
        problem, fix = f"cannot be read ({error.strerror})", "remove it from the inputs or allow access"
    if problem:
        yield UnreadableFile(path=path, num_bytes=size - done, problem=problem, fix=fix)


def _line_ranges(path: str, size: int, piece_bytes: int) -> Iterator[Piece]:
    with open(path, "rb"):
        pass  # one failure for a file that may not be read, not one for each of its ranges
    for start in range(0, size, piece_bytes):
        stop = min(start + piece_bytes, size)
        yield LineRange(path=path, start=start, stop=stop, num_bytes=stop - start)


def _line_blocks(path: str, compression: Literal[".gz", ".zst"], piece_bytes: int) -> Iterator[Piece]:
    parts: list[bytes] = []
    held = accounted = position = 0
    try:
        for part, position in decompress(path, compression):
            held += len(part)
            cut = part.rfind(b"\n") + 1
            if held < piece_bytes or cut == 0:
                parts.append(part)
                continue
            lines = b"".join((*parts, part[:cut]))
            parts = [part[cut:]]
            held = len(parts[0])
            yield LineBlock(path=path, lines=lines, num_bytes=position - accounted)
            accounted = position
    except DamagedFileError:
        # The lines that are whole come first.
        whole, newline, _ = b"".join(parts).rpartition(b"\n")
        yield LineBlock(path=path, lines=whole + newline, num_bytes=position - accounted)
        raise
    if held or position > accounted:
        yield LineBlock(path=path, lines=b"".join(parts), num_bytes=position - accounted)


def _row_batches(path: str, size: int, keys: Sequence[str], piece_bytes: int) -> Iterator[Piece]:
    done = 0.0
    for columns, share in read_batches(path, keys, piece_bytes):
        begin, done = done, done + share
        num_bytes = round(size * done) - round(size * begin)
        yield RowBatch(path=path, columns=tuple(columns), num_bytes=num_bytes)
