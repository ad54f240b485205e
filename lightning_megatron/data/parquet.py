"""Sizes of the pages of a Parquet file, before a library allocates them.

A page of a few bytes can claim to become two gigabytes, and the totals in the footer need not be true. PyArrow has no
limit of its own. Here the header of each page is read: a struct of Thrift's compact protocol. Source: parquet.thrift
(``PageHeader``) and thrift-compact-protocol.md of the Apache projects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

_HEADER_BYTES = 1 << 16
"""Maximum size of a page's header; with statistics it has a few kilobytes."""
_DICTIONARY_PAGE = 2
_STOP = 0
_TRUE = 1
_FALSE = 2
_BYTE = 3
_INTEGERS = (4, 5, 6)
_DOUBLE = 7
_BINARY = 8
_LIST = 9
_SET = 10
_STRUCT = 12


class Page(NamedTuple):
    """Header of a page."""

    is_dictionary: bool
    num_bytes: int
    """Size of its content after decompression."""
    stored_bytes: int
    """Size of its content in the file."""


def read_pages(
    stream: BinaryIO,
    metadata: Any,
    columns: list[str],
) -> Iterator[Page]:
    """Yield the header of each page of some columns.

    Args:
        stream: The open file.
        metadata: ``pyarrow.parquet.FileMetaData`` of it.
        columns: Names of columns that are not nested.

    Raises:
        OSError: If a header is damaged.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema in columns:
                begins = (column.dictionary_page_offset, column.data_page_offset)
                begin = min(offset for offset in begins if offset)
                yield from _pages_of_chunk(stream, begin, begin + column.total_compressed_size)


def _pages_of_chunk(
    stream: BinaryIO,
    begin: int,
    end: int,
) -> Iterator[Page]:
    while begin < end:
        try:
            stream.seek(begin)
            header = _Header(stream.read(_HEADER_BYTES))
            kind = header.fields[1]
            num_bytes = header.fields[2]
            stored_bytes = header.fields[3]
        except (IndexError, KeyError, RecursionError, ValueError) as error:
            raise OSError(f"the header of a page at byte {begin} is damaged: {error!r}") from None
        if min(num_bytes, stored_bytes) < 0:
            raise OSError(f"the header of a page at byte {begin} has a negative size")
        yield Page(kind == _DICTIONARY_PAGE, num_bytes, stored_bytes)
        begin += header.length + stored_bytes


class _Header:
    """A struct at the beginning of ``data``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = 0
        """Bytes read."""
        self.fields = self._struct()
        """Values of its integers, by number of the field."""

    def _struct(self) -> dict[int, int]:
        fields: dict[int, int] = {}
        number = 0
        while (head := self._byte()) != _STOP:
            delta = head >> 4
            if delta:
                number += delta
            else:
                number = self._integer()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int) -> int:
        """Read a value; 0 for those that are not integers."""
        if kind in _INTEGERS:
            return self._integer()
        if kind == _STRUCT:
            self._struct()
        elif kind in (_LIST, _SET):
            self._list()
        elif kind == _BINARY:
            size = self._unsigned()
            self.length += size
        elif kind == _BYTE:
            self.length += 1
        elif kind == _DOUBLE:
            self.length += 8
        elif kind not in (_TRUE, _FALSE):  # the value of a boolean is its kind
            raise ValueError(f"a value of kind {kind}")
        return 0

    def _list(self) -> None:
        head = self._byte()
        size = head >> 4
        if size == 15:
            size = self._unsigned()
        for _ in range(size):
            if head & 15 in (_TRUE, _FALSE):
                self._byte()
            else:
                self._value(head & 15)
            self._data[self.length - 1]  # a claimed size ends with the data

    def _byte(self) -> int:
        self.length += 1
        return self._data[self.length - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
