"""Directories on object stores: downloaded as a whole, complete by a marker, deleted.

A directory is complete if it has the file ``COMPLETE_MARKER``, which is written last and deleted first.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.storage.paths import as_path

COMPLETE_MARKER = "meta.pt"
"""File that marks a directory on an object store as complete; written last, deleted first."""


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
        local = [str(target / name) for name in names.values()]
        source.fs.get(list(names), local)
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
    parts = name.split("/") if name else []
    leads_out = not {"", ".", ".."}.isdisjoint(parts)
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
        remote: Any = folder
        remote.fs.rm(remote.path, recursive=True)
