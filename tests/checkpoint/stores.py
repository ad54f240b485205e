"""A file system of fsspec that is none of the operating system's: a folder under addresses, without links or renames of
folders, as an object store has none. For rank functions: several processes see the same, as ``memory://`` does not.
"""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "shared"


class SharedFileSystem(LocalFileSystem):
    """``shared:///tmp/x`` is the folder ``/tmp/x``."""

    protocol = PROTOCOL
    copies_left: int | None = None
    """Files that may yet be copied before the store fails; None for any number."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix(f"{PROTOCOL}://").strip("/")

    def copy(self, path1: str, path2: str, **options: Any) -> None:  # type: ignore[override]
        if SharedFileSystem.copies_left is not None:
            if SharedFileSystem.copies_left == 0:
                raise OSError("the store is gone")
            SharedFileSystem.copies_left -= 1
        super().cp_file(self._strip_protocol(path1), self._strip_protocol(path2), **options)


def register() -> None:
    fsspec.register_implementation(PROTOCOL, SharedFileSystem, clobber=True)
