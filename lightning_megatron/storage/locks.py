"""Exclusive locks on directories that are being written.

A directory being written is locked with ``flock`` on the directory itself: the kernel releases the lock when the
process ends, however it ends, and no lock file is left. To wait for another process instead (a cache that one of
several jobs builds), use ``filelock.FileLock`` around ``staged``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from lightning_megatron.errors import ConfigError


class FolderLock:
    """Exclusive ``flock`` on a directory being written; released when the process ends."""

    def __init__(
        self,
        folder: Path,
        error: type[ConfigError] = ConfigError,
    ) -> None:
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
            # Not by closing alone: a forked worker may have inherited the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)
            self.descriptor = None
