"""How is a compressed file read as a stream: in constant memory, and so that a damaged one is noticed?"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

READ_BYTES = 1 << 16
"""Compressed bytes taken at a time; text grows to some ten times as many."""

PART_BYTES = 1 << 19
"""Bytes of a part; lines that repeat each other grow ten thousandfold, and no piece of work shall be that large."""

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
"""Tells zlib that a gzip header and checksum surround the data."""

_LONGEST_ZSTD_WINDOW = 1 << 31
"""What ``zstd --long=31`` needs; large public corpora are compressed so."""


class DamagedFileError(Exception):
    """A compressed file that is cut off or is no such file; the message says which."""


def decompress(path: str, compression: Literal[".gz", ".zst"]) -> Iterator[tuple[bytes, int]]:
    """The content of a compressed file in parts, each with the number of compressed bytes read until then.

    Members or frames one after the other are one content, as ``cat a.gz b.gz`` makes them.

    Raises:
        DamagedFileError: If the file is cut off, its checksum is wrong, or it is not of this kind.
        OSError: If it cannot be read.
    """
    start, failures = _decompressor(compression)
    with open(path, "rb") as stream:
        current: Any = None
        while data := stream.read(READ_BYTES):
            while data:
                if current is None:
                    # gzip files may be padded with zeros, e.g. those on tapes.
                    data = data.lstrip(b"\0") if compression == ".gz" else data
                    if not data:
                        break
                    current = start()
                try:
                    content = current.decompress(data)
                except failures as error:
                    raise DamagedFileError(f"is damaged, or not compressed as its name says ({error})") from error
                for begin in range(0, max(len(content), 1), PART_BYTES):
                    yield content[begin : begin + PART_BYTES], stream.tell()
                data = current.unused_data if current.eof else b""
                current = None if current.eof else current
        if current is not None:
            raise DamagedFileError("ends in the middle of the compressed data: cut off")


def _decompressor(compression: Literal[".gz", ".zst"]) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a decompressor of one member or frame, and how it fails."""
    if compression == ".gz":
        return lambda: zlib.decompressobj(wbits=_GZIP_WINDOW), zlib.error
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_LONGEST_ZSTD_WINDOW)
    return decompressor.decompressobj, zstandard.ZstdError
