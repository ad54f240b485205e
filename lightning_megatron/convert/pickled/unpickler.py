"""What does a file of ``torch.save`` hold? Its objects, read without running anything, and tensors as places in it.

Both formats are read: the zip archive (torch 1.6 and newer), and what came before it, a row of pickles with the numbers
behind them. In both a tensor's numbers lie in one piece, so that rows can be read alone.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lightning_megatron.convert.pickled.allowed import find_global
from lightning_megatron.convert.pickled.pickle_machine import Damaged, Global, Refused, read_pickle
from lightning_megatron.convert.pickled.tensor_handle import Storage
from lightning_megatron.errors import CheckpointError

_LARGEST_PICKLE = 1 << 27
"""Bytes of the part of a file that is not tensors."""
_MAGIC = 0x1950A86A20F9469CFC6C
"""First number in a file of torch before 1.6 (torch/serialization.py)."""
_PROTOCOL = 1001
_BEGINNING_OF_ZIP = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
"""Of a member in a zip file, before its name (PKWARE, APPNOTE.TXT, 4.3.7)."""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Bytes of a file that are a file themselves, as a stored member of a zip file is."""

    path: Path
    start: int
    size: int

    @classmethod
    def whole(cls, path: Path) -> FilePart:
        """All of a file."""
        return cls(path=path, start=0, size=path.stat().st_size)


def load_pickled(file: Path | FilePart) -> Any:
    """The object in a file of ``torch.save``, with a ``TensorHandle`` for each tensor.

    Namespaces come as such, NumPy's scalars as Python's, and objects of Megatron's classes as ``Inert``.

    Raises:
        CheckpointError: If loading it could run code, or it is missing, damaged or truncated.
    """
    path = file if isinstance(file, Path) else file.path
    try:
        part = FilePart.whole(file) if isinstance(file, Path) else file
        with path.open("rb") as opened:
            stream = io.BufferedReader(_Window(opened, part))
            if zipfile.is_zipfile(stream):
                return _load_archive(stream, part)
            stream.seek(0)
            if stream.read(len(_BEGINNING_OF_ZIP)) == _BEGINNING_OF_ZIP:
                raise Damaged("it ends too early")
            stream.seek(0)
            return _load_sequence(stream, part)
    except Refused as error:
        raise CheckpointError(f"{path} is not loaded: {error}; do not trust its source") from None
    except (Damaged, zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged, or no file of torch.save ({error}); use another copy") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); check the path") from None


class _Window(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, opened: IO[bytes], part: FilePart) -> None:
        self._opened, self._part, self._place = opened, part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._part.size}[whence]
        if origin + offset < 0:
            raise OSError(f"byte {origin + offset}")  # as files do: zipfile asks whether they are too short so
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        size = max(0, min(len(view), self._part.size - self._place))
        self._opened.seek(self._part.start + self._place)
        data = self._opened.read(size)
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


# ---- zip archives ---------------------------------------------------------------------------------------------------


def member_part(stream: IO[bytes], info: zipfile.ZipInfo, part: FilePart) -> FilePart:
    """Where in the file a stored member of the zip file ``part`` is.

    Raises:
        Damaged: If it is not there.
    """
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != _BEGINNING_OF_ZIP:
        raise Damaged(f"no header of {info.filename[:80]!r}")
    name, extra = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
    start = info.header_offset + _LOCAL_HEADER_BYTES + name + extra
    if start + info.file_size > part.size:
        raise Damaged(f"{info.filename[:80]!r} ends behind the file")
    return FilePart(path=part.path, start=part.start + start, size=info.file_size)


def _load_archive(stream: IO[bytes], part: FilePart) -> Any:
    with zipfile.ZipFile(stream) as archive:
        members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in members if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise Damaged("a zip file without a data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if members[pickles[0]].file_size > _LARGEST_PICKLE:
            raise Damaged(f"a data.pkl of {members[pickles[0]].file_size:,} bytes")
        order = b"little"
        if f"{folder}byteorder" in members:
            order = _content(stream, members[f"{folder}byteorder"], part)
        text = _content(stream, members[pickles[0]], part)
    if order not in (b"little", b"big"):
        raise Damaged(f"the byte order {order!r}")

    def storage_of(key: str, _: int) -> Storage:
        info = members[f"{folder}data/{key}"]
        _check_stored(info)
        place = member_part(stream, info, part)
        return Storage(file=part.path, offset=place.start, num_bytes=place.size, is_little_endian=order == b"little")

    return read_pickle(io.BytesIO(text), find_global, _Storages(storage_of))


def _content(stream: IO[bytes], info: zipfile.ZipInfo, part: FilePart) -> bytes:
    """A stored member; ``torch.serialization.set_crc32_options(False)`` writes zero for its checksum."""
    _check_stored(info)
    place = member_part(stream, info, part)
    stream.seek(place.start - part.start)
    content = stream.read(place.size)
    if info.CRC not in (0, zlib.crc32(content)):
        raise Damaged(f"the checksum of {info.filename[:80]!r} is another one")
    return content


def _check_stored(info: zipfile.ZipInfo) -> None:
    """Raise if a member is compressed: a few bytes could become very many."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise Damaged(f"{info.filename[:80]!r} is compressed, which torch.save never does")


class _Storages:
    """What the persistent ids of a pickle stand for: each storage, made once, with its dtype."""

    def __init__(self, make: Callable[[str, int], Storage]) -> None:
        self._make = make
        self.known: dict[str, Storage] = {}

    def __call__(self, saved: Any) -> tuple[Storage, torch.dtype]:
        if not isinstance(saved, tuple) or len(saved) < 5 or saved[0] not in ("storage", b"storage"):
            raise Refused("it refers to something that is no tensor")
        _, dtype, key, _, items, *rest = saved
        if isinstance(dtype, Global) or not isinstance(dtype, torch.dtype):
            raise Damaged("a storage of no dtype")
        if not isinstance(key, str) or type(items) is not int or items < 0:
            raise Damaged("a storage without a name or a size")
        if any(view is not None for view in rest):
            raise Damaged("a view of a storage, which torch has not written since 0.4")
        num_bytes = items * dtype.itemsize
        if key not in self.known:
            self.known[key] = self._make(key, num_bytes)
        if self.known[key].num_bytes < num_bytes:
            raise Damaged(f"storage {key[:20]} has {self.known[key].num_bytes:,} of {num_bytes:,} bytes")
        return self.known[key], dtype


# ---- before torch 1.6 -----------------------------------------------------------------------------------------------


def _load_sequence(stream: IO[bytes], part: FilePart) -> Any:
    """Five pickles (magic number, version, machine, object, names of storages), then each storage with its length."""
    magic, version, machine = (read_pickle(stream, find_global) for _ in range(3))
    if magic != _MAGIC or version != _PROTOCOL or not isinstance(machine, dict):
        raise Damaged("it does not begin as such a file")
    is_little_endian = machine.get("little_endian", True) is True
    start = stream.tell()

    def unplaced(_: str, num_bytes: int) -> Storage:
        return Storage(file=part.path, offset=0, num_bytes=num_bytes)

    sizes = _Storages(unplaced)
    read_pickle(stream, find_global, sizes)  # the places of storages are known behind it only
    names = read_pickle(stream, find_global)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Damaged("no list of storages")
    places: dict[str, Storage] = {}
    place = stream.tell()
    for name in names:
        num_bytes = sizes.known[name].num_bytes
        place += 8  # the length, in items
        if place + num_bytes > part.size:
            raise Damaged(f"it ends before storage {name[:20]}")
        places[name] = Storage(
            file=part.path, offset=part.start + place, num_bytes=num_bytes, is_little_endian=is_little_endian
        )
        place += num_bytes
    stream.seek(start)
    return read_pickle(stream, find_global, _Storages(lambda key, _: places[key]))
