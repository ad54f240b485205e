"""How are the text columns of a Parquet file read in batches, however large its row groups are?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

READ_BUFFER_BYTES = 1 << 20
MAX_BATCH_ROWS = 1 << 14


class UnsuitableTableError(Exception):
    """A file that is no table, or one without the columns; the message is the problem and the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix


def read_batches(path: str, keys: Sequence[str], batch_bytes: int) -> Iterator[tuple[list[list[str | None]], float]]:
    """The columns ``keys`` in batches of about ``batch_bytes``, each with the share of all rows that it is.

    A value that is missing, or is not UTF-8, is None.

    Raises:
        UnsuitableTableError: If the file is damaged or no Parquet file, or has not these columns of strings.
        OSError: If it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # Pages are read as they are needed: a row group may be the whole file.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        ) as table:
            _require_text_columns(table.schema_arrow, keys)
            rows = _rows_a_batch(table.metadata, keys, batch_bytes)
            for batch in table.iter_batches(rows, columns=list(keys), use_threads=False):
                columns = [_texts(batch.column(key)) for key in keys]
                yield columns, batch.num_rows / table.metadata.num_rows
    # OSError is what damaged pages raise, as well as a disk that fails; one without a number is the former.
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        problem = f"is damaged, or no Parquet file ({str(error).splitlines()[0].rstrip('.')})"
        raise UnsuitableTableError(problem, "make or fetch it again, or remove it") from error


def _require_text_columns(schema: Any, keys: Sequence[str]) -> None:
    from pyarrow.types import is_dictionary

    for key in keys:
        if key not in schema.names:
            present = ", ".join(schema.names) or "none"
            raise UnsuitableTableError(f"has no column '{key}'", f"choose --json-keys from {present}")
        if schema.names.count(key) > 1:
            raise UnsuitableTableError(f"has several columns '{key}'", "rename all but one")
        kind = schema.field(key).type
        value = kind.value_type if is_dictionary(kind) else kind
        if str(value) not in ("string", "large_string", "string_view"):
            raise UnsuitableTableError(f"has a column '{key}' of type {kind}, not of strings", "store text there")


def _rows_a_batch(metadata: Any, keys: Sequence[str], batch_bytes: int) -> int:
    num_rows: int = metadata.num_rows
    size = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if column.path_in_schema in keys:
                size += column.total_uncompressed_size
    return max(1, min(MAX_BATCH_ROWS, batch_bytes * num_rows // max(size, 1)))


def _texts(column: Any) -> list[str | None]:
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = [_text(value) for value in column]
    return texts


def _text(value: Any) -> str | None:
    try:
        text: str | None = value.as_py()
    except UnicodeDecodeError:
        return None
    return text
