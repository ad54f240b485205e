"""Atomic publication, locking and checksums of files and directories, on disks and object stores.

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
import stat
import tempfile
import threading
import traceback
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal, NoReturn, cast

from lightning_megatron.errors import CheckpointError, ConfigError

COMPLETE_MARKER = "meta.pt"
"""File that marks a directory on an object store as complete; written last, deleted first."""
PARTIAL = ".partial"
"""Suffix of a directory being written; after an exchange, of the one that was replaced."""

_REPLACED = ".replaced"
_REMOVED = ".removed"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


# ---- object stores --------------------------------------------------------------------------------------------------


def as_path(address: str | Path) -> Path:
    """``Path`` of a local address, or a ``UPath`` of an address with ``://``.

    Raises:
        ConfigError: If the package for that store is not installed, or the protocol is unknown.
    """
    if "://" not in str(address):
        return Path(address)
    try:
        from upath import UPath

        path = UPath(str(address), use_listings_cache=False)  # other ranks write there, too
        assert path.fs is not None  # created lazily: fail here rather than in the middle of a run
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{address} cannot be opened ({error}); pip install 'lightning-megatron[remote]' and the package of that "
            "store (s3fs for s3://, gcsfs for gs://), or give a path on a disk that all nodes share"
        ) from None
    return cast(Path, path)


def is_remote(path: Path) -> bool:
    """Whether the path is on an object store."""
    return hasattr(path, "fs")


@contextlib.contextmanager
def synced_file(path: Path, buffering: int = -1) -> Iterator[Any]:
    """Open a new binary file; it is synced to disk, or uploaded to the store, when the block ends.

    Raises:
        OSError: If the file cannot be written; in a store, whatever type its client and its files raise.
    """
    if not is_remote(path):
        with path.open("wb", buffering) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        return
    try:
        with path.open("wb") as stream:
            yield stream
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_new(path: Path, mode: Literal["w", "wb"] = "w") -> IO[Any]:
    """Open a new file in place of one of this name; a link is replaced, and not written through.

    A device or a pipe, such as ``/dev/stdout``, is opened itself.
    """
    if path.exists() and not path.is_file():
        return path.open(mode)
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), mode, encoding=None if mode == "wb" else "utf-8")


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to append to it; a link of its name is replaced by a new file, and not written through."""
    if path.is_symlink():
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure of matplotlib in the format of the file's suffix, or as PNG with that suffix if it has none."""
    path = path if path.suffix[1:] else path.with_name(f"{path.name.rstrip('.')}.png")
    with open_new(path, "wb") as file:
        figure.savefig(file, format=path.suffix[1:].lower())


def file_sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file in a directory, by name; a single request to a store."""
    if not is_remote(folder):
        return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    entries = cast(Any, folder).fs.ls(cast(Any, folder).path, detail=True)
    return {
        entry["name"].rpartition("/")[2]: entry["size"]
        for entry in entries
        if entry["type"] == "file"
    }


def download(address: str) -> Path:
    """Download a directory from a store into a temporary directory, which lasts until the process exits.

    Raises:
        ConfigError: If it does not exist or cannot be read, or lists a name that leads out of the directory.
    """
    source: Any = as_path(address)
    copy = tempfile.TemporaryDirectory(prefix="lightning_megatron_")
    _downloads.append(copy)
    target = Path(copy.name, source.name)
    if target.parent != Path(copy.name) or target.name == "..":  # the root of a bucket has no name
        target = Path(copy.name, "copy")
    try:
        listed = source.fs.find(source.path, detail=True)
        if not listed:
            raise FileNotFoundError(f"there is no file below {source.path}")
        names = {
            remote: _listed_name(remote, entry["type"], source.path)
            for remote, entry in listed.items()
        }
        source.fs.get(list(names), [str(target / name) for name in names.values()])
    except ConfigError:
        raise
    except Exception as error:  # clients of stores have types of their own
        raise ConfigError(
            f"{address} cannot be read ({error}); correct the address, or its permissions"
        ) from error
    return target


def _listed_name(remote: str, kind: str, root: str) -> str:
    """Relative path of a file that a store lists below ``root``; "" for ``root`` itself.

    Raises:
        ConfigError: If it is no ordinary file, or its path would lead out of a directory on this or another system.
    """
    root = root.rstrip("/")
    name = remote.removeprefix(root).removeprefix("/")
    is_below = remote == root or remote.startswith(f"{root}/")
    is_plain = not re.search(r"[\\\x00-\x1f]|^[A-Za-z]:", name)
    leads_out = bool(name) and any(part in ("", ".", "..") for part in name.split("/"))
    if kind != "file" or not is_below or not is_plain or leads_out:
        raise ConfigError(
            f"{root}: expected a listing of files below it, got {remote!r} ({kind}); do not trust this store"
        )
    return name


_downloads: list[tempfile.TemporaryDirectory[str]] = []


def delete_from_store(folder: Path) -> None:
    """Delete a directory of a store, ``COMPLETE_MARKER`` first, so that a half-deleted one is never read."""
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
    """Exclusive ``flock`` on a directory being written; released when the process ends."""

    def __init__(self, folder: Path, error: type[ConfigError] = ConfigError) -> None:
        """Lock ``folder``; does nothing on a file system without locks.

        Raises:
            ConfigError: As type ``error``, if another process holds the lock, or ``folder`` is a link or a file: its
                name is one that is emptied and removed.
        """
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        except OSError as failure:
            if failure.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise error(
                f"{folder}: expected nothing, or a directory that a killed run has left, got a link or a file; "
                "remove it"
            ) from None
        self.descriptor: int | None = descriptor
        """Open descriptor that holds the lock; None after ``release``, and on a file system without locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise error(
                f"another program is writing {folder} at this moment; give every run its own directory"
            ) from None
        except OSError:  # locks are not supported, e.g. on some network file systems
            self.release()

    def release(self) -> None:
        """Release the lock."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    self.descriptor, fcntl.LOCK_UN
                )  # a forked worker may have inherited the descriptor
            os.close(self.descriptor)
            self.descriptor = None


# ---- publishing -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, with which batch systems end jobs, into ``SystemExit``, so that partial output is removed."""

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def staged(
    folder: Path, name: str, *, last: Collection[str] = (), error: type[ConfigError] = ConfigError
) -> Iterator[Path]:
    """Yield a locked, empty, hidden staging directory in ``folder``; publish its content when the block ends.

    Existing files and directories of the same names are replaced. Leftovers of a killed run are removed first, and
    after an exception nothing is left.

    Args:
        folder: Final directory of the content; created if missing.
        name: Name of the output, from which the staging directory is named: only one process at a time can write it.
        last: Files whose presence implies that the others are complete, e.g. an index: deleted first, published last.
        error: Type of the exception to raise.

    Raises:
        ConfigError: As type ``error``, if another process writes the same output, or it cannot be written.
    """
    partial = folder / f".{name}{PARTIAL}"
    try:
        lock = lock_partial(partial, error)
        try:
            yield partial
            wait_for_deletions()  # replaced output in the staging directory must be neither synced nor published
            for file in partial.rglob("*"):
                sync(file)
            for file_name in last:
                (folder / file_name).unlink(missing_ok=True)
            for file in sorted(partial.iterdir(), key=lambda file: file.name in last):
                publish(file, folder / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            lock.release()
            wait_for_deletions()
    except OSError as failure:
        raise error(
            f"{folder / name} cannot be written ({failure}); choose a writable directory with enough space"
        ) from failure


def lock_partial(partial: Path, error: type[ConfigError]) -> FolderLock:
    """Create a staging directory, lock it, and delete what a killed run left in it.

    Somebody else may have made a link or a directory of this name: nothing is followed, and nothing of theirs deleted.

    Raises:
        ConfigError: As type ``error``, if another process is writing it, it is a link, or it belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        partial.mkdir(parents=True)
    lock = FolderLock(partial, error)
    try:
        _empty(partial, error)
    except BaseException:
        lock.release()
        raise
    return lock


def _empty(partial: Path, error: type[ConfigError]) -> None:
    """Delete the content of a staging directory of this user, through one descriptor: the name may change meanwhile.

    Raises:
        ConfigError: As type ``error``, if it has content and belongs to another user.
    """
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        names = os.listdir(descriptor)
        owner = os.fstat(descriptor).st_uid
        if names and not _is_this_user(owner, partial.parent):
            raise error(
                f"{partial}: expected a directory of this user, got one of user {owner} with files in it; remove it if "
                "nobody is writing there"
            )
        for name in names:
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=descriptor)
            else:
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _is_this_user(owner: int, folder: Path) -> bool:
    """Whether ``owner`` owns what this process creates in ``folder``: a network file system may map root to nobody."""
    if owner == os.geteuid():
        return True
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".owner_") as probe:
        return os.fstat(probe.fileno()).st_uid == owner


def publish(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``; at every moment either the old or the new one exists and is complete.

    If ``path`` does not exist, what an interrupted ``publish`` left beside it may be the only copy, and is deleted
    last. A replaced directory is deleted in the background.

    Args:
        partial: A complete directory or file on the same file system, with its files synced.
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
        _delete_now(replaced)
        path.rename(replaced)
        partial.rename(path)
    sync(path.parent)
    if os.path.lexists(replaced):
        _delete(replaced)


def recover(path: Path) -> Path:
    """``path``, or the complete replaced or staged directory beside it if a crash interrupted a ``publish``."""
    if is_remote(path):
        partial = path.with_name(path.name + PARTIAL)
        return (
            partial
            if not (path / COMPLETE_MARKER).is_file() and (partial / COMPLETE_MARKER).is_file()
            else path
        )
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.is_dir() else path


def remove(path: Path) -> None:
    """Delete a directory, link or file, and what a crash left beside it.

    The name is gone when this returns; the files of a directory are deleted in the background.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    if is_remote(path):
        delete_from_store(path.with_name(path.name + PARTIAL))
        delete_from_store(path)
        return
    replaced = path.with_name(path.name + _REPLACED)
    for folder in (path, replaced):
        if folder.is_dir():  # of a link, the link is deleted
            _delete(folder)
    _remove_if_abandoned(path.with_name(path.name + PARTIAL))


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete leftovers of killed processes in ``folder`` whose names match ``pattern``, unless they are locked."""
    for leftover in folder.glob(f"{pattern}{_REMOVED}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in folder.glob(f"{pattern}{PARTIAL}"):
        _remove_if_abandoned(leftover)


def _remove_if_abandoned(partial: Path) -> None:
    """Delete a staging directory unless it is locked, or the file system has no locks to tell."""
    # An empty one may have just been created, and is about to be locked.
    if not partial.is_symlink() and partial.is_dir() and any(partial.iterdir()):
        with contextlib.suppress(ConfigError):
            lock = FolderLock(partial)
            is_own = lock.descriptor is not None and _is_this_user(
                os.fstat(lock.descriptor).st_uid, partial.parent
            )
            if is_own:
                shutil.rmtree(partial, ignore_errors=True)
            lock.release()


def wait_for_deletions() -> None:
    """Wait for all deletions in the background."""
    while _deletions:
        _deletions.pop().result()


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_deleter = ThreadPoolExecutor(1)
_deletions: list[Future[None]] = []


def _delete(path: Path) -> None:
    """Delete a file, or rename a directory and delete it in a thread: that takes a second for a few gigabytes."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    wait_for_deletions()
    removed = path.with_name(path.name.removesuffix(PARTIAL).removesuffix(_REPLACED) + _REMOVED)
    _delete_now(removed)
    path.rename(removed)
    sync(path.parent)
    _deletions.append(
        _deleter.submit(shutil.rmtree, removed, ignore_errors=True)
    )  # exit waits for it


def _delete_now(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False if kernel, C library or file system does not support it."""
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
"""Bytes covered by one checksum; the last one of a file covers the remainder."""

_READ_SIZE = 4 * 2**20
_THREADS = 4
_ALGORITHM = "crc32"


@dataclass(kw_only=True)
class FileChecksums:
    """Checksums of one file, updated as it is written sequentially."""

    size: int = 0
    """Bytes so far."""
    segments: list[int] = field(default_factory=list)
    """CRC-32 of each segment of ``SEGMENT`` bytes."""

    def update(self, data: bytes | memoryview) -> FileChecksums:
        """Append bytes; zlib releases the GIL meanwhile."""
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
    """Write ``checksums.json`` and sync it."""
    table = {name: asdict(files[name]) for name in sorted(files)}
    content = {
        "algorithm": _ALGORITHM,
        "segment_bytes": SEGMENT,
        "files": table,
        "checksum_of_files": _checksum_of_table(table),
    }
    with synced_file(folder / CHECKSUMS) as stream:
        stream.write(json.dumps(content).encode())


def verify_checksums(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Verify the checksums of a checkpoint, or of one share of its segments.

    Args:
        folder: The checkpoint.
        share: ``(rank, world)``: verify share ``rank`` of ``world`` about equal ones.

    Raises:
        CheckpointError: If a file is missing, or its size or a checksum differs; names the first such file and bytes.
    """
    files, sizes = _read_checksums(folder), file_sizes(folder)
    for name, checksums in files.items():
        if name not in sizes:
            require_file(folder / name)
        if (size := sizes.get(name)) != checksums.size:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {size} of {checksums.size} bytes; use an earlier one"
            )
    work = [
        (name, index)
        for name, checksums in files.items()
        for index in range(len(checksums.segments))
    ]
    rank, world = share
    own = work[len(work) * rank // world : len(work) * (rank + 1) // world]
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums_read = pool.map(
            lambda item: _crc32(folder / item[0], item[1] * SEGMENT, files[item[0]].size), own
        )
        for (name, index), crc in zip(own, checksums_read, strict=True):
            if crc != files[name].segments[index]:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: {name} differs from its checksum in bytes {index * SEGMENT}-"
                    f"{min((index + 1) * SEGMENT, files[name].size)}; use an earlier one"
                )


def _read_checksums(folder: Path) -> dict[str, FileChecksums]:
    try:
        content: dict[str, Any] = json.loads((folder / CHECKSUMS).read_bytes())
        table = content["files"]
        is_known = content["algorithm"] == _ALGORITHM and content["segment_bytes"] == SEGMENT
        files = {name: FileChecksums(**each) for name, each in table.items()}
        sizes = [
            type(each.size) is int and len(each.segments) == -(-each.size // SEGMENT)
            for each in files.values()
        ]
        if (
            not is_known
            or not all(sizes)
            or content["checksum_of_files"] != _checksum_of_table(table)
        ):
            raise ValueError("its content has changed since it was written")
        return files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {CHECKSUMS} cannot be read ({error}); use an earlier one"
        ) from None


def _checksum_of_table(table: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())


def _crc32(file: Path, start: int, size: int) -> int:
    """CRC-32 of the segment that begins at ``start``, read in small pieces to save memory."""
    crc, end = 0, min(start + SEGMENT, size)
    with file.open("rb") as stream:
        stream.seek(start)
        for begin in range(
            start, end, _READ_SIZE
        ):  # if the file was truncated, the checksum differs
            crc = zlib.crc32(stream.read(min(_READ_SIZE, end - begin)), crc)
    return crc


def require_file(file: Path) -> None:
    """Check that a file of a checkpoint exists.

    Raises:
        CheckpointError: If it does not.
    """
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint {file.parent} lacks its file {file.name}: it was never finished, is damaged, or another "
            "program wrote it; use an earlier one"
        )


# ---- failures -------------------------------------------------------------------------------------------------------

_FILE_ERRORS = (OSError, EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError)
"""What torch raises for files that are missing, damaged or of another model, and for a full disk."""

_FILE_ERROR_NAMES = {"CheckpointingException"}
"""The same of Megatron; by name, since conversion needs no import of it."""
_STORE_PACKAGES = {"fsspec", "upath"}
"""Packages through which every call of a store goes."""

_MAX_REASON_LENGTH = 300
"""Characters."""


@contextlib.contextmanager
def failures_as_errors(refusal: str) -> Iterator[None]:
    """Convert exceptions caused by files or a disk to ``CheckpointError``; others are bugs and propagate.

    Args:
        refusal: Beginning of the message, e.g. "PATH cannot be written"; the reason is appended.

    Raises:
        CheckpointError: With the reason of the first rank that failed.
    """
    try:
        yield
    except BaseException as error:
        # In a collective load torch raises the failures of all ranks on every rank.
        rank, (cause, _) = min(getattr(error, "failures", {0: (error, None)}).items())
        if not is_caused_by_files(cause):
            raise
        raise CheckpointError(
            f"{refusal}: {_reason(cause)}" + (f" (on rank {rank})" if cause is not error else "")
        ) from error


@contextlib.contextmanager
def store_failures_as_errors(refusal: str) -> Iterator[None]:
    """Convert what a store's client raises, of whatever type, to ``CheckpointError``; all else propagates.

    Args:
        refusal: Beginning of the message; the reason is appended.

    Raises:
        CheckpointError: With the reason.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or not _is_from_store(error):
            raise
        raise CheckpointError(
            f"{refusal}: {_reason(error)}; correct the address, or its permissions"
        ) from error


def pickle_refusal(error: pickle.UnpicklingError) -> str:
    """Why torch refused to unpickle a file; torch's own message advises to load it anyway."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    return (
        f"it holds more than data ({match.group(1)})"
        if match
        else "it holds more than data, or is damaged"
    )


def is_caused_by_files(error: BaseException) -> bool:
    """Whether files, a disk or an object store have caused ``error``; other errors are bugs."""
    names = {base.__name__ for base in type(error).__mro__}
    return (
        isinstance(error, _FILE_ERRORS)
        or not names.isdisjoint(_FILE_ERROR_NAMES)
        or _is_from_store(error)
    )


def _is_from_store(error: BaseException) -> bool:
    """Whether a store's client has raised ``error``, of whatever type: botocore's, for example, share no base.

    Every call of a store goes through fsspec, or through a method of a file system or file of fsspec's.
    """
    if not isinstance(error, Exception):
        return False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        bases = {
            base.__module__.partition(".")[0] for base in type(frame.f_locals.get("self")).__mro__
        }
        if package in _STORE_PACKAGES or not bases.isdisjoint(_STORE_PACKAGES):
            return True
    return False


def _reason(error: BaseException) -> str:
    if isinstance(error, pickle.UnpicklingError):
        return pickle_refusal(error)
    text = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, _FILE_ERRORS):
        text = f"{type(error).__name__}: {text}"  # of a library, whose messages may be a word
    if isinstance(error, CheckpointError):
        return text  # already converted
    if len(text) > _MAX_REASON_LENGTH:  # torch lists all tensors if one is missing
        text = text[:_MAX_REASON_LENGTH] + "..."
    # Torch's archive writer does not give the reason of a failed write (inline_container.cc).
    return (
        f"{text} (is the disk full?)" if "inline_container" in text or "iostream" in text else text
    )


def readable_size(num_bytes: float) -> str:
    """Human-readable size with three significant digits, e.g. ``12.3 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:  # larger ones would print as 1e+03
            break
        num_bytes, unit = num_bytes / 1000, "TB"
    return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.3g} {unit}"
