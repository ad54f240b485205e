"""Atomically publish files and folders, lock them while they are written, and sum up what is in them.

Output that takes long to write is written beside its final name and published when it is complete, so that readers of
the final name see either the old or the new content, always complete::

    with staged(folder, "model", error=CheckpointError) as partial:
        (partial / "model").mkdir()  # or any number of files and directories, under their final names
        ...
    # folder/model is now the new one; after an exception it is unchanged, and nothing is left behind

``publish`` is the last step alone, for writers that outlive a ``with`` block. Where kernel and file system support it,
two directories exchange their names atomically (``renameat2``). Elsewhere (e.g. NFS) the old one is renamed first, and
``recover`` finds it if the program dies before the second rename. Contents and names are synced to disk before anything
older is deleted, and a directory is renamed before it is deleted, so that a half-deleted one is never read.

A directory being written is locked with ``flock`` on the directory itself: the kernel releases the lock when the
process ends, however it ends, and no lock file is left. To wait for another process instead (a cache that one of
several jobs builds), use ``filelock.FileLock`` around ``staged``.

Directories on object stores (``s3://``, ``gs://``: all that fsspec supports) are ``pathlib``-like objects from
``as_path``. There are no locks and no renames; a file appears, complete, when it is closed. A directory is complete if
it has the file ``COMPLETE_MARKER``, which is written last and deleted first. A replacement for an existing directory is
written beside it and then copied by the store; ``recover`` finds it if the program dies meanwhile.

``checksums.json`` has a CRC-32 for every 64 MiB of every other file of a checkpoint. CRC-32 detects every flipped bit
and every burst of up to 32 bits; it does not protect against deliberate tampering.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

from lightning_megatron.errors import CheckpointError, ConfigError

COMPLETE_MARKER = "meta.pt"
"""On an object store, says that a folder is whole."""
PARTIAL = ".partial"
"""Ends the name of a folder that is being written; after an exchange, of the one that was replaced."""

_REPLACED = ".replaced"
_REMOVED = ".removed"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


# ---- object stores --------------------------------------------------------------------------------------------------


def as_path(address: str | Path) -> Path:
    """The path, or for an address with ``://`` an object with a path's methods.

    Raises:
        ConfigError: If a package that is needed is not installed, or nobody knows such addresses.
    """
    if "://" not in str(address):
        return Path(address)
    try:
        from upath import UPath

        place = UPath(str(address), use_listings_cache=False)  # other ranks write there, too
        assert place.fs is not None  # now, and not in the midst of a run
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{address} cannot be opened ({error}); pip install 'lightning-megatron[remote]' and the package of that "
            "store (s3fs for s3://, gcsfs for gs://), or give a path on a disk that all nodes share"
        ) from None
    return cast(Path, place)


def is_remote(path: Path) -> bool:
    """Whether ``as_path`` has made it of an address."""
    return hasattr(path, "fs")


@contextlib.contextmanager
def synced_file(path: Path, buffering: int = -1) -> Iterator[Any]:
    """A new file to write bytes to, which is on the disk, or in the store, when the block ends."""
    with path.open("wb") if is_remote(path) else path.open("wb", buffering) as stream:
        yield stream
        if not is_remote(path):
            stream.flush()
            os.fsync(stream.fileno())


def file_sizes(folder: Path) -> dict[str, int]:
    """The size of each file in a folder, by name; one request to a store."""
    if not is_remote(folder):
        return {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}
    entries = cast(Any, folder).fs.ls(cast(Any, folder).path, detail=True)
    return {each["name"].rpartition("/")[2]: each["size"] for each in entries if each["type"] == "file"}


def download(address: str) -> Path:
    """A copy on this host's disk, below its folder for temporary files, of a folder in a store; until the program ends.

    Raises:
        ConfigError: If there is none, or it cannot be read.
    """
    place: Any = as_path(address)
    copy = tempfile.TemporaryDirectory(prefix="lightning_megatron_")
    _copies.append(copy)
    try:
        place.fs.get(place.path, f"{copy.name}/{place.name}", recursive=True)
    except OSError as error:
        raise ConfigError(f"{address} cannot be read ({error}); correct the address, or its rights") from error
    return Path(copy.name, place.name)


_copies: list[tempfile.TemporaryDirectory[str]] = []


def delete_from_store(folder: Path) -> None:
    """Delete a folder of a store, ``COMPLETE_MARKER`` first, so that no half of it is ever taken for a whole."""
    (folder / COMPLETE_MARKER).unlink(missing_ok=True)
    if folder.exists():
        cast(Any, folder).fs.rm(cast(Any, folder).path, recursive=True)


def _publish_remote(partial: Path, path: Path) -> None:
    if partial != path:
        delete_from_store(path)
        store = cast(Any, path).fs
        for name in sorted(file_sizes(partial), key=lambda name: name == COMPLETE_MARKER):
            store.copy(cast(Any, partial / name).path, cast(Any, path / name).path)
    delete_from_store(path.with_name(path.name + PARTIAL))


# ---- locks ----------------------------------------------------------------------------------------------------------


class FolderLock:
    """Tells other programs that a folder is being written; ends with the process."""

    def __init__(self, folder: Path, error: type[ConfigError] = ConfigError) -> None:
        """Lock ``folder``; on a file system without locks nothing happens.

        Raises:
            ConfigError: ``error``, if another program has it.
        """
        self.descriptor: int | None = os.open(folder, os.O_RDONLY)
        """None after ``release``, and where the file system has no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise error(
                f"another program is writing {folder} at this moment; give every run a folder of its own"
            ) from None
        except OSError:  # no locks here, e.g. on some network file systems
            self.release()

    def release(self) -> None:
        """Let others have it."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a forked worker may hold the descriptor as well
            os.close(self.descriptor)
            self.descriptor = None


# ---- publishing -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """A batch system ends jobs by SIGTERM, which would end this process without the removal of what it has begun."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def staged(
    folder: Path, name: str, *, last: Collection[str] = (), error: type[ConfigError] = ConfigError
) -> Iterator[Path]:
    """A locked, empty, hidden folder in ``folder``, whose content moves into ``folder`` when the block ends.

    Files of the same names are replaced, folders as a whole. What a killed run has left there is removed first, and
    after an exception nothing is left.

    Args:
        folder: Where the content shall be in the end; made if need be.
        name: What is written, for the name of the hidden folder: two programs cannot write the same at once.
        last: Names that vouch for the others, as an index does: old ones leave first, new ones arrive last.
        error: What to raise if another program is writing the same, or a disk refuses.

    Raises:
        ConfigError: ``error``.
    """
    partial = folder / f".{name}{PARTIAL}"
    try:
        lock = lock_partial(partial, error)
        try:
            yield partial
            wait_for_deletions()  # what was replaced there must be neither met half gone nor published
            for file in partial.rglob("*"):
                sync(file)
            for each in last:
                (folder / each).unlink(missing_ok=True)
            for written in sorted(partial.iterdir(), key=lambda file: file.name in last):
                publish(written, folder / written.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
            wait_for_deletions()
    except OSError as failure:
        raise error(
            f"{folder / name} cannot be written ({failure}); choose a folder that can be written, with enough space"
        ) from failure


def lock_partial(partial: Path, error: type[ConfigError]) -> FolderLock:
    """Make a folder to write into, lock it, and empty it of what a killed run has left there.

    Raises:
        ConfigError: ``error``, if another program is writing it.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(partial, error)
    for left in partial.iterdir():
        _delete_at_once(left)
    return lock


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``; at every moment the old or the new one exists whole.

    If ``path`` does not exist, what an interrupted ``publish`` left beside it may be the only one, and stays until the
    end. An old folder is deleted in the background.

    Args:
        partial: A complete folder or file on the same file system; its files have been synced.
        path: The final name.
    """
    if is_remote(path):
        _publish_remote(partial, path)
        return
    replaced = path.with_name(path.name + _REPLACED)
    sync(partial)
    if not os.path.lexists(path) or (partial.is_file() and not path.is_dir()):
        partial.replace(path)
    elif _exchange(partial, path):
        sync(path.parent)
        _delete(partial)
    else:
        _delete_at_once(replaced)
        path.rename(replaced)
        partial.rename(path)
    sync(path.parent)
    if os.path.lexists(replaced):
        _delete(replaced)


def recover(path: Path) -> Path:
    """``path``, or what it replaced if a crash fell between the two renames of a file system without exchange."""
    if is_remote(path):
        partial = path.with_name(path.name + PARTIAL)
        return partial if not (path / COMPLETE_MARKER).is_file() and (partial / COMPLETE_MARKER).is_file() else path
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.is_dir() else path


def remove(path: Path) -> None:
    """Delete a folder, a link or a file, whichever ``path`` is, and what a crash left beside it.

    It has lost its name when this returns; the files of a folder go in the background.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if is_remote(path):
        delete_from_store(path.with_name(path.name + PARTIAL))
        delete_from_store(path)
        return
    for folder in (path, path.with_name(path.name + _REPLACED)):
        if folder.is_dir():
            _delete(folder)
    _remove_if_left(path.with_name(path.name + PARTIAL))


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete what killed programs left of names like ``pattern`` in ``folder``; what somebody writes stays."""
    for left in folder.glob(f"{pattern}{_REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f"{pattern}{PARTIAL}"):
        _remove_if_left(left)


def _remove_if_left(partial: Path) -> None:
    """Delete a folder that a killed program was writing; where the file system has no locks, nobody knows, it stays."""
    # An empty one may have just been made, and is about to be locked.
    if partial.is_dir() and any(partial.iterdir()):
        with contextlib.suppress(ConfigError):
            lock = FolderLock(partial)
            if lock.descriptor is not None:
                shutil.rmtree(partial, ignore_errors=True)
            lock.release()


def wait_for_deletions() -> None:
    """Wait until the files of what was deleted are gone."""
    while _deletions:
        _deletions.pop().result()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_deleter = ThreadPoolExecutor(1)
_deletions: list[Future[None]] = []


def _delete(path: Path) -> None:
    """Delete a file; or a folder, which takes a name that nobody reads, in a thread: a second for a few gigabytes."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    wait_for_deletions()
    removed = path.with_name(path.name.removesuffix(PARTIAL).removesuffix(_REPLACED) + _REMOVED)
    _delete_at_once(removed)
    path.rename(removed)
    sync(path.parent)
    _deletions.append(_deleter.submit(shutil.rmtree, removed, ignore_errors=True))  # the program's end waits for it


def _delete_at_once(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap the names of two things in one step; False where kernel, C library or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(a), None, str(b))


# ---- checksums ------------------------------------------------------------------------------------------------------

CHECKSUMS = "checksums.json"

SEGMENT = 64 * 2**20
"""Bytes that one checksum covers; the last one of a file covers what is left."""

_PIECE = 4 * 2**20
_THREADS = 4
_ALGORITHM = "crc32"


@dataclass(kw_only=True)
class FileChecksums:
    """The checksums of one file, which grow as it is written from its beginning to its end."""

    size: int = 0
    """Bytes."""
    segments: list[int] = field(default_factory=list)
    """CRC-32 of each ``SEGMENT`` bytes."""

    def update(self, data: bytes | memoryview) -> FileChecksums:
        """Append bytes; other threads run meanwhile, since zlib lets go of the interpreter."""
        data = memoryview(data)
        while len(data) > 0:
            room = SEGMENT - self.size % SEGMENT
            if room == SEGMENT:
                self.segments.append(0)
            self.segments[-1] = zlib.crc32(data[:room], self.segments[-1])
            self.size += min(room, len(data))
            data = data[room:]
        return self


def write_checksums(folder: Path, files: Mapping[str, FileChecksums]) -> None:
    """Write ``checksums.json``, and wait until it is on the disk."""
    described = {name: asdict(files[name]) for name in sorted(files)}
    content = {
        "algorithm": _ALGORITHM,
        "segment_bytes": SEGMENT,
        "files": described,
        "checksum_of_files": _checksum_of_table(described),
    }
    with synced_file(folder / CHECKSUMS) as stream:
        stream.write(json.dumps(content).encode())


def verify_checksums(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Read a share of a checkpoint's bytes and compare.

    Args:
        folder: The checkpoint.
        share: ``(rank, world)``: this is share ``rank`` of ``world`` about equal ones.

    Raises:
        CheckpointError: If a file is missing, has another size or other bytes than were written; the first such file
            and its bytes are named.
    """
    files, sizes = _read_checksums(folder), file_sizes(folder)
    for name, checksums in files.items():
        if name not in sizes:
            require_file(folder / name)
        if (size := sizes.get(name)) != checksums.size:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {size} of {checksums.size} bytes; use an earlier one"
            )
    work = [(name, index) for name, checksums in files.items() for index in range(len(checksums.segments))]
    rank, world = share
    mine = work[len(work) * rank // world : len(work) * (rank + 1) // world]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda place: _crc32(folder / place[0], place[1] * SEGMENT, files[place[0]].size), mine)
        for (name, index), crc in zip(mine, found, strict=True):
            if crc != files[name].segments[index]:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} differs from its checksum in bytes {index * SEGMENT}-"
                    f"{min((index + 1) * SEGMENT, files[name].size)}; use an earlier one"
                )


def _read_checksums(folder: Path) -> dict[str, FileChecksums]:
    try:
        content: dict[str, Any] = json.loads((folder / CHECKSUMS).read_bytes())
        described = content["files"]
        known = content["algorithm"] == _ALGORITHM and content["segment_bytes"] == SEGMENT
        files = {name: FileChecksums(**each) for name, each in described.items()}
        sizes = [type(each.size) is int and len(each.segments) == -(-each.size // SEGMENT) for each in files.values()]
        if not known or not all(sizes) or content["checksum_of_files"] != _checksum_of_table(described):
            raise ValueError("its content is not what was written")
        return files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {CHECKSUMS} cannot be read ({error}); use an earlier one"
        ) from None


def _checksum_of_table(described: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(described, sort_keys=True).encode())


def _crc32(file: Path, start: int, size: int) -> int:
    """Of the segment that begins at ``start``, read in pieces so that little memory is needed."""
    crc, end = 0, min(start + SEGMENT, size)
    with file.open("rb") as stream:
        stream.seek(start)
        for begin in range(start, end, _PIECE):  # of a file that has become shorter, the checksum will differ
            crc = zlib.crc32(stream.read(min(_PIECE, end - begin)), crc)
    return crc


def require_file(file: Path) -> None:
    """Raise unless the file of a checkpoint is there.

    Raises:
        CheckpointError: If it is not.
    """
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {file.parent} lacks its file {file.name}: it was never finished, is damaged, or another "
            "program wrote it; use an earlier one"
        )


# ---- failures -------------------------------------------------------------------------------------------------------

_CAUSED_BY_FILES = (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError)
"""What torch raises on files that are missing, damaged or of another model, and on a disk that is full."""

_LIKEWISE = {"CheckpointingException", "BotoCoreError", "HttpError"}
"""What Megatron and clients of stores raise then; by name, since a conversion needs none of them, or none is there."""

_LONGEST_REASON = 300
"""Characters."""


@contextlib.contextmanager
def failures_as_errors(refusal: str) -> Iterator[None]:
    """Raise a ``CheckpointError`` for failures that files or a disk can cause; the rest are defects, and stay.

    Args:
        refusal: What did not happen; the message begins with it and goes on with the reason.

    Raises:
        CheckpointError: With the reason of the first rank that failed.
    """
    try:
        yield
    except BaseException as error:
        # Torch raises on all ranks what any rank has raised in a collective load.
        rank, (cause, _) = min(getattr(error, "failures", {0: (error, None)}).items())
        if not _is_caused_by_files(cause):
            raise
        raise CheckpointError(
            f"{refusal}: {_reason(cause)}" + (f" (on rank {rank})" if cause is not error else "")
        ) from error


def pickle_refusal(error: pickle.UnpicklingError) -> str:
    """What a file holds that torch refused; torch's own text advises to load it nevertheless."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it holds more than data ({found.group(1)})" if found else "it holds more than data, or is damaged"


def _is_caused_by_files(error: BaseException) -> bool:
    return isinstance(error, _CAUSED_BY_FILES) or any(base.__name__ in _LIKEWISE for base in type(error).__mro__)


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return pickle_refusal(error)
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, CheckpointError):
        return text  # it has been here before
    if len(text) > _LONGEST_REASON:  # torch lists all tensors where one is missing
        text = text[:_LONGEST_REASON] + "..."
    # Torch's archive writer does not say why it could not write (inline_container.cc).
    return f"{text} (is the disk full?)" if "inline_container" in text or "iostream" in text else text


def readable_size(num_bytes: float) -> str:
    """A number of bytes for readers, three digits of it: ``12.3 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:  # which would be 1e+03 of its unit
            break
        num_bytes, unit = num_bytes / 1000, "TB"
    return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.3g} {unit}"
