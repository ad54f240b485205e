"""Decompressed content of gzip and zstd files, within limits of memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lightning_megatron.data.input_files import format_of
from lightning_megatron.data.pieces import PIECE_BYTES

_COMPRESSED_BYTES = 1 << 16
"""Compressed bytes read at a time; text decompresses to about ten times as many."""
_ZSTD_BYTES = 1 << 11
"""Compressed bytes given to zstd at a time, which cannot be told to pause: they decompress to at most 64 MiB."""
_MAX_ZSTD_WINDOW = 1 << 31
"""Window of ``zstd --long=31``, with which large public corpora are compressed."""
_MIN_ZSTD_WINDOW = 1 << 27
"""Window that a file of any size may have; the decompressor comes to hold as many bytes."""
MAX_EXPANSION = 500
MIN_LARGEST_FILE = 1 << 24
"""A file may decompress to ``MAX_EXPANSION`` times its size and so many bytes more."""


def read_parts(path: str | Path, part_bytes: int = PIECE_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield a file's decompressed content in parts of at most ``part_bytes``, each with the stored bytes read so far.

    Concatenated gzip members or zstd frames are read as one content, as of ``cat a.gz b.gz``.

    Raises:
        OSError: If the file cannot be read, is truncated, has a wrong checksum, another compression than its name, or
            decompresses to far more than text does.
    """
    _, compression = format_of(path)
    with open(path, "rb") as stream:
        if not compression:
            while part := stream.read(part_bytes):
                yield part, stream.tell()
            return
        size = os.fstat(stream.fileno()).st_size
        left = MIN_LARGEST_FILE + MAX_EXPANSION * size
        for content in _decompress(stream, compression, size):
            left -= len(content)
            if left < 0:
                raise OSError(
                    f"its {size:,} bytes decompress to more than {MAX_EXPANSION} times as many; if it is meant to, "
                    "decompress it first"
                )
            for begin in range(0, len(content), part_bytes):
                yield content[begin : begin + part_bytes], stream.tell()


def _decompress(
    stream: BinaryIO,
    compression: str,
    size: int,
) -> Iterator[bytes]:
    """Decompressed content of a file of ``size`` bytes, in parts of at most 64 MiB.

    Raises:
        OSError: See ``read_parts``.
    """
    current: Any = None
    at_a_time = _ZSTD_BYTES if compression == ".zst" else _COMPRESSED_BYTES
    while data := stream.read(at_a_time):
        while data:
            if current is None:
                # gzip files may be padded with zeros, e.g. those on tapes.
                data = data.lstrip(b"\0")
                if not data:
                    break
                current, failure = _decompressor(compression, size)
            try:
                content = current.decompress(data)
            except failure as error:
                raise OSError(f"damaged, or not compressed as its name says: {error}") from error
            yield content
            data = b""
            if current.eof:
                data = current.unused_data
                current = None
    if current is not None:
        raise OSError("it ends in the middle of the compressed data")


def _decompressor(compression: str, size: int) -> tuple[Any, type[Exception]]:
    """A decompressor for one gzip member or zstd frame, and the exception that it raises.

    Args:
        compression: Suffix of the file.
        size: Size of the file, which limits the window.
    """
    if compression == ".gz":
        # 16: with gzip's header and checksum.
        return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    # In the extra "data".
    import zstandard

    window = min(max(_MIN_ZSTD_WINDOW, MAX_EXPANSION * size), _MAX_ZSTD_WINDOW)
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    return decompressor.decompressobj(), zstandard.ZstdError
