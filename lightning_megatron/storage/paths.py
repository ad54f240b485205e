"""Paths on disks and object stores, and files opened, synced and named in them.

Directories on object stores (``s3://``, ``gs://``: all that fsspec supports) are ``pathlib``-like objects from
``as_path``. There are no locks and no renames; a file appears, complete, when it is closed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast

from lightning_megatron.errors import ConfigError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW


def as_path(address: str | Path) -> Path:
    """``Path`` of a local address, or a ``UPath`` of an address with ``://``.

    Raises:
        ConfigError: If the package for that store is not installed, or the protocol is unknown.
    """
    if "://" not in str(address):
        return Path(address)
    try:
        from upath import UPath  # optional

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
    descriptor = os.open(path, os.O_EXCL | _CREATE, 0o666)
    encoding = None if mode == "wb" else "utf-8"
    return os.fdopen(descriptor, mode, encoding=encoding)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file to append to it; a link of its name is replaced by a new file, and not written through."""
    if path.is_symlink():
        path.unlink()
    descriptor = os.open(path, os.O_APPEND | _CREATE, 0o666)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure of matplotlib in the format of the file's suffix, or as PNG with that suffix if it has none."""
    if not path.suffix[1:]:
        path = path.with_name(f"{path.name.rstrip('.')}.png")
    with open_new(path, "wb") as file:
        figure.savefig(file, format=path.suffix[1:].lower())


def file_sizes(folder: Path) -> dict[str, int]:
    """Size in bytes of each file in a directory, by name; a single request to a store."""
    if not is_remote(folder):
        files = [file for file in folder.iterdir() if file.is_file()]
        return {file.name: file.stat().st_size for file in files}
    remote: Any = folder
    entries = remote.fs.ls(remote.path, detail=True)
    return {
        entry["name"].rpartition("/")[2]: entry["size"]
        for entry in entries
        if entry["type"] == "file"
    }


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable_size(num_bytes: float) -> str:
    """Human-readable size with three significant digits, e.g. ``12.3 MB``."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while num_bytes >= 999.5 and len(units) > 1:  # would print as 1e+03
        num_bytes /= 1000
        del units[0]
    unit = units[0]
    if unit == "bytes":
        return f"{num_bytes:,.0f} bytes"
    return f"{num_bytes:,.3g} {unit}"
