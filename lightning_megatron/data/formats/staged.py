"""How does a pair of files appear under its name whole or not at all, whatever ends the process that writes it?

Each file grows under a hidden name, ``.NAME.bin.HOST.PID.RANDOM.partial``, and is renamed when both are complete and on
disk. A killed process leaves the hidden files; the next run that writes the same dataset on the same host removes them.
A lock on each (``flock``) tells whether its writer lives: the kernel frees it when a process ends, however it ends, and
unlike a process id it is never somebody else's, not even in another container. The name of the host keeps a run from
judging by a lock that a shared file system may not have told it of.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO, NoReturn, Self

from lightning_megatron.errors import DataError


class StagedPair(ABC):
    """Writes one dataset; it appears under its name only when it is complete.

    Use as a context manager: leaving it normally publishes the files, leaving it by an exception removes them. ``.idx``
    appears last, so it vouches for ``.bin``.
    """

    def __init__(self, prefix: str) -> None:
        """Begin to write at ``prefix``, whose folder is made if need be.

        Raises:
            DataError: If nothing can be written there; so do all methods, also when the disk is full.
        """
        self._prefix = Path(prefix)
        with self._writing():
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            _remove_what_killed_runs_left(self._prefix)
            self._bin = _create_locked(self._prefix, ".bin")
        self._idx: BinaryIO | None = None

    def write(self, tokens: bytes) -> None:
        """Append to ``.bin``."""
        with self._writing():
            self._bin.write(tokens)

    @abstractmethod
    def _index_parts(self) -> Iterator[bytes]:
        """The bytes of ``.idx``; asked for after the last token."""

    def complete(self) -> None:
        """Bring both files to the disk, under their hidden names; then only renaming is left, which needs no room.

        Leaving the context does it too. Several datasets that belong together are completed one after the other before
        the first appears.
        """
        with self._writing():
            _sync(self._bin)
            self._idx = _create_locked(self._prefix, ".idx")
        for part in self._index_parts():
            with self._writing():
                self._idx.write(part)
        with self._writing():
            _sync(self._idx)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._idx is None:
                    self.complete()
                self._publish()
        finally:
            for stream in filter(None, (self._bin, self._idx)):
                Path(stream.name).unlink(missing_ok=True)
                # What a full disk has refused, it refuses again when the rest of the buffer is written.
                with contextlib.suppress(OSError):
                    stream.close()

    def _publish(self) -> None:
        assert self._idx is not None, "complete() has opened it"
        with self._writing(), _locked_folder(self._prefix.parent):
            idx_path, bin_path = Path(f"{self._prefix}.idx"), Path(f"{self._prefix}.bin")
            # An old index must not meet the new tokens, not even for a moment.
            idx_path.unlink(missing_ok=True)
            # Both are open still: closed, they would look like those of a killed run.
            os.replace(self._bin.name, bin_path)
            os.replace(self._idx.name, idx_path)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self._prefix}.bin and .idx cannot be written ({error.strerror}); give an output prefix in a folder"
                " that can be written and has room"
            ) from error


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """A batch system ends jobs by SIGTERM, which would end this process without the removal of what it has begun."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def require_new(prefix: str) -> None:
    """Nothing is overwritten: the only copy of a corpus may be what stands there, an input included.

    Raises:
        DataError: If a file of the dataset ``prefix`` exists, or ``prefix`` is none.
    """
    existing = [prefix + suffix for suffix in (".idx", ".bin") if os.path.lexists(prefix + suffix)]
    if existing:
        raise DataError(f"output_prefix={prefix} would overwrite {', '.join(existing)}; choose another or remove them")
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"output_prefix={prefix} ends like a file, it must be the prefix of two; write {prefix[:-4]}")
    if not os.path.basename(prefix):
        raise DataError(f"output_prefix={prefix} names no file; add one, e.g. {os.path.join(prefix, 'corpus')}")


def _staging_names(prefix: Path, suffix: str) -> str:
    """What the hidden names begin with for one file of a dataset on this host."""
    return f".{prefix.name}{suffix}.{socket.gethostname()}."


def _create_locked(prefix: Path, suffix: str) -> BinaryIO:
    while True:
        name = f"{_staging_names(prefix, suffix)}{os.getpid()}.{secrets.token_hex(4)}.partial"
        stream = open(prefix.with_name(name), "xb")  # noqa: SIM115 (closed by StagedPair.__exit__)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()  # another run tries the lock, and will remove the file
            continue
        except OSError:
            return stream  # a file system without locks: no run gets one there, so none removes the file
        if os.path.lexists(stream.name):
            return stream
        stream.close()  # another run had it between its creation and its lock


def _remove_what_killed_runs_left(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        for path in prefix.parent.glob(glob.escape(_staging_names(prefix, suffix)) + "*.partial"):
            # Whatever cannot be opened, locked or removed stays; it is in nobody's way.
            with contextlib.suppress(OSError), open(path, "r+b") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Two runs that end at once rename one after the other, else one's .bin could stay with the other's .idx."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
