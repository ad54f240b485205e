"""Which records do files of JSON lines hold, and in which file and line is each?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightning_megatron.data.corpus.compressed import DamagedFileError, decompress
from lightning_megatron.data.corpus.files import find_files, format_of
from lightning_megatron.errors import DataError

Record: TypeAlias = dict[str, Any]

_READ_BYTES = 1 << 20


def record_files(path: str) -> list[Path]:
    """The files of JSON lines that ``path`` stands for, in order; a file named by itself is one whatever its name.

    Raises:
        ConfigError: If one needs a library that is not installed.
        DataError: If there is none.
    """
    files = find_files([path])
    if Path(path).expanduser().is_file():
        return files
    files = [file for file in files if format_of(file).content == "json lines"]
    if not files:
        raise DataError(f"{path} holds no .jsonl file; give the file, or a folder or pattern with some")
    return files


_INSTRUCTION = '{"prompt": ..., "completion": ...} or {"messages": [...]}'


def read_records(
    files: Sequence[Path], on_bytes: Callable[[int], object] = lambda _: None, example: str = _INSTRUCTION
) -> Iterator[tuple[str, Record]]:
    """Each record with its place, ``FILE, line N``; blank lines are none.

    Args:
        files: JSON lines, also compressed.
        on_bytes: Is told of progress, in bytes of the files on disk.
        example: What a line should look like, for error messages.

    Raises:
        DataError: With the place, if a line is no JSON object; if a file cannot be read.
    """
    for file in files:
        try:
            told = 0
            for number, (line, position) in enumerate(_lines(file), 1):
                if line and not line.isspace():
                    place = f"{file}, line {number}"
                    yield place, _parse(line, place, example)
                on_bytes(position - told)
                told = position
        except DamagedFileError as error:
            raise DataError(f"{file} {error}; make or fetch it again") from error
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror}); replace it or allow access") from error


def _lines(file: Path) -> Iterator[tuple[bytes, int]]:
    """Each line, and the bytes of the file read until then."""
    compression = format_of(file).compression
    parts = decompress(str(file), compression) if compression else _parts(file)
    rest, position = b"", 0
    for part, position in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from ((line, position) for line in lines)
    yield rest, position


def _parts(file: Path) -> Iterator[tuple[bytes, int]]:
    with open(file, "rb") as stream:
        while part := stream.read(_READ_BYTES):
            yield part, stream.tell()


def _parse(line: bytes, place: str, example: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON ({error}); correct or remove that line") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} holds a {type(record).__name__}, not a JSON object; write {example}")
    return record
