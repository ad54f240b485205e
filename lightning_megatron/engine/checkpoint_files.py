"""How do a rank's shards become files while training goes on? Threads write them, and sum up what they write.

Only threads of this process: a fork would double the memory of a trainer with its GPU context, and a spawned process
would run the user's script again. They leave the interpreter to the trainer, because nearly all of their time passes in
system calls and in zlib, on large pieces; torch's own checksum of an archive's entries, which holds the interpreter,
is off meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item

from lightning_megatron.engine.checkpoint_checksums import FileChecksums

_PIECE = 16 * 2**20
"""Bytes between two looks at whether the save was abandoned."""

_BUFFER = 2**20

Shards = tuple[list[tuple[Any, io.BytesIO]], list[tuple[Any, torch.Tensor]]]
"""What one file holds, as Megatron's writer plans it: entries of bytes and of tensors, each with its ``WriteItem``."""


class _Abandoned(Exception):
    """Nobody wants the files any more."""


class _ChecksummedFile(io.RawIOBase):
    """A new file that sums up what is written to it, in the order of its bytes."""

    def __init__(self, file: Path, is_abandoned: threading.Event) -> None:
        super().__init__()
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._is_abandoned = is_abandoned
        self.checksums = FileChecksums()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            if self._is_abandoned.is_set():
                raise _Abandoned
            piece = view[start : start + _PIECE]
            self.checksums.update(piece)
            while len(piece) > 0:
                piece = piece[os.write(self._descriptor, piece) :]
        return len(view)

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self.checksums.size

    def sync(self) -> None:
        """Wait until the content has reached the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


class FileWriter:
    """Writes the files of one rank in threads of their own."""

    def __init__(self, folder: Path, shards: Mapping[str, Shards], plain: Mapping[str, bytes]) -> None:
        """Start to write.

        Args:
            folder: Exists, and nobody else writes these names there.
            shards: What the data files hold, by name; must not change until ``wait`` returns.
            plain: Whole contents of other files, by name.
        """
        self._folder = folder
        self._is_abandoned = threading.Event()
        self._results: list[Any] = []
        self._checksums: dict[str, FileChecksums] = {}
        self._error: Exception | None = None
        jobs = [partial(self._write_shards, name, of_file) for name, of_file in shards.items()]
        jobs.append(partial(self._write_plain, plain))
        self._threads = [threading.Thread(target=self._run, args=(job,), daemon=True) for job in jobs]
        _unfinished.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all files have been written, or have failed."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> tuple[list[Any], dict[str, FileChecksums]]:
        """Torch's ``WriteResult`` of every shard, and the checksums of every file.

        Raises:
            Exception: What the first failed thread raised, e.g. an ``OSError`` where the disk is full.
        """
        self._join()
        if self._error is not None:
            raise self._error
        return self._results, self._checksums

    def abandon(self) -> None:
        """Stop soon, and wait for it; half-written files stay."""
        self._is_abandoned.set()
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        _unfinished.discard(self)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            with _without_archive_checksums:
                job()
        except Exception as error:
            self._error = self._error or error

    def _write_shards(self, name: str, shards: Shards) -> None:
        with self._open(name) as stream:
            entries: list[tuple[Any, io.BytesIO | torch.Tensor]] = [*shards[0], *shards[1]]
            for item, data in entries:
                self._results.append(
                    _write_item(_StorageWriterTransforms(), stream, data, item, name, SerializationFormat.TORCH_SAVE)
                )

    def _write_plain(self, plain: Mapping[str, bytes]) -> None:
        for name, data in plain.items():
            with self._open(name) as stream:
                stream.write(data)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        raw = _ChecksummedFile(self._folder / name, self._is_abandoned)
        with raw:
            stream = io.BufferedWriter(raw, _BUFFER)
            yield stream
            stream.flush()
            raw.sync()
        self._checksums[name] = raw.checksums


class _WithoutArchiveChecksums:
    """Keeps torch's option off while any thread is inside, and puts it back after the last.

    The option belongs to a thread in torch 2.13, and to the program in some earlier versions.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.serialization.set_crc32_options(self._before)


_without_archive_checksums = _WithoutArchiveChecksums()
_unfinished: weakref.WeakSet[FileWriter] = weakref.WeakSet()


def _abandon_all() -> None:
    """At the end of the program nobody will finish these, and a thread must not outlive the interpreter."""
    for writer in list(_unfinished):
        writer.abandon()


atexit.register(_abandon_all)


def torch_bytes(value: Any) -> bytes:
    """What ``torch.save`` would write to a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
