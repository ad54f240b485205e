"""Cut files of JSON lines into pieces."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_megatron.data.decompression import read_parts
from lightning_megatron.data.pieces import Piece, read_failure, too_long


def cut_lines(
    path: str,
    size: int,
    piece_bytes: int,
    max_document_bytes: int,
) -> Iterator[Piece]:
    """Yield the lines of a file of ``size`` bytes in pieces; only the last line may lack its newline."""
    buffer = bytearray()
    first = 1
    accounted = 0
    problem = ""
    try:
        for part, position in read_parts(path, piece_bytes):
            buffer += part
            unfinished = len(part) - part.rfind(b"\n") - 1
            if len(buffer) >= piece_bytes and unfinished < len(part):
                lines = bytes(buffer[: len(buffer) - unfinished])
                yield Piece(
                    path=path,
                    lines=lines,
                    first=first,
                    num_bytes=position - accounted,
                    max_document_bytes=max_document_bytes,
                )
                del buffer[: len(lines)]
                first += lines.count(b"\n")
                accounted = position
            if len(buffer) > max_document_bytes + piece_bytes:
                raise _TooLongError(too_long(max_document_bytes))
    except _TooLongError as error:
        problem = f"has a line after line {first - 1} that {error}; further lines are not read"
        buffer.clear()
    except OSError as error:
        problem = read_failure(error)
        del buffer[buffer.rfind(b"\n") + 1 :]  # complete lines are still read
    if buffer or accounted < size:
        yield Piece(
            path=path,
            lines=bytes(buffer),
            first=first,
            num_bytes=size - accounted,
            problem=problem,
            max_document_bytes=max_document_bytes,
        )


class _TooLongError(Exception):
    """A document is longer than the limit."""
