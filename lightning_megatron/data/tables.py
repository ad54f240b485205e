"""Cut Parquet tables into pieces: pages are read as they are needed, and only columns of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from lightning_megatron.data.decompression import MAX_EXPANSION, MIN_LARGEST_FILE
from lightning_megatron.data.parquet import read_pages
from lightning_megatron.data.pieces import Piece, read_failure

_MAX_ROWS = 1 << 14
_MAX_BAD_ROWS = 1 << 16
"""Maximum number of rows to report if a column is missing."""
_MAX_REPEATED_BYTES = 1 << 26
"""Maximum size of the rows read at a time if each is the whole dictionary of its column."""


def cut_rows(
    path: str,
    size: int,
    keys: Sequence[str],
    piece_bytes: int,
    max_document_bytes: int,
) -> Iterator[Piece]:
    """The columns ``keys`` of a table, with row groups of any size: pages are read as they are needed.

    Texts stay in the dictionaries of the file, so that one that many rows share is in memory once.
    """
    # In the extra "data".
    import pyarrow
    import pyarrow.parquet

    done = accounted = total = 0
    try:
        with (
            open(path, "rb") as stream,
            pyarrow.parquet.ParquetFile(
                path,
                buffer_size=1 << 20,
                pre_buffer=False,
                page_checksum_verification=True,
            ) as table,
        ):
            problem = _column_problem(table.schema_arrow, keys)
            if problem is not None:
                rows = min(table.metadata.num_rows, _MAX_BAD_ROWS)
                yield Piece(path=path, rows=[problem] * rows, num_bytes=size)
                return
            num_rows = table.metadata.num_rows
            rows = _rows_at_a_time(stream, table.metadata, list(keys), size, piece_bytes)
            batches = table.iter_batches(rows, columns=list(keys), use_threads=False)
            for batch in batches:
                total += batch.nbytes
                if total > MIN_LARGEST_FILE + MAX_EXPANSION * size:
                    raise OSError(
                        f"its {size:,} bytes become more than {MAX_EXPANSION} times as many"
                    )
                first = done + 1
                done += batch.num_rows
                before = accounted
                accounted = size * done // num_rows
                yield Piece(
                    path=path,
                    rows=batch.to_pylist(),
                    first=first,
                    num_bytes=accounted - before,
                    max_document_bytes=max_document_bytes,
                )
    # Damaged pages raise OSError too, invalid UTF-8 raises UnicodeError.
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        yield Piece(path=path, num_bytes=size - accounted, problem=read_failure(error))


def _column_problem(schema: Any, keys: Sequence[str]) -> dict[str, Any] | None:
    """A row with the same problem as all rows if a column is missing or holds no text; None if there is none.

    A column of lists can hold billions of items in a few bytes: only text is read.
    """
    # In the extra "data".
    import pyarrow

    row: dict[str, Any] = dict.fromkeys(schema.names, "")
    text_types = (
        pyarrow.types.is_string,
        pyarrow.types.is_large_string,
        pyarrow.types.is_string_view,
    )
    for field in schema:
        kind = field.type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if field.name in keys and not any(is_text(kind) for is_text in text_types):
            row[field.name] = NoText(str(field.type))
    is_bad = any(not isinstance(row.get(key), str) for key in keys)
    return row if is_bad else None


class NoText:
    """Stands for the values of a column that holds no text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def _rows_at_a_time(
    stream: BinaryIO,
    metadata: Any,
    columns: list[str],
    size: int,
    piece_bytes: int,
) -> int:
    """Rows to read at a time, so that they take about ``piece_bytes``, and far from all memory if they repeat a text.

    Raises:
        OSError: If a page would become far larger than text does.
    """
    dictionary = 0
    num_bytes = 0
    for page in read_pages(stream, metadata, columns):
        if page.num_bytes > MIN_LARGEST_FILE + MAX_EXPANSION * page.stored_bytes:
            raise OSError(f"a page of {page.stored_bytes:,} bytes would become {page.num_bytes:,}")
        num_bytes += page.num_bytes
        if page.is_dictionary:
            dictionary = max(dictionary, page.num_bytes)
    bytes_per_row = max(num_bytes // max(metadata.num_rows, 1), 1)
    rows_of_a_piece = piece_bytes // bytes_per_row
    repeated_rows = _MAX_REPEATED_BYTES // max(dictionary, 1)
    largest: int = min(_MAX_ROWS, rows_of_a_piece, repeated_rows)
    return max(1, largest)
