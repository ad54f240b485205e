"""How are bytes of a weights file read so that they do not count as memory of this process for longer than needed?"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_megatron.errors import CheckpointError


def read_into(buffer: torch.Tensor, file: Path, offset: int) -> None:
    """Fill ``buffer`` (uint8) from ``file``, with plain reads: mapped pages would count as memory of this process.

    Raises:
        CheckpointError: If the file cannot be read, or ends too early.
    """
    view, done = memoryview(buffer.numpy().data), 0
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while done < len(view):
                count = opened.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"weights file {file} is truncated; use another copy")
                done += count
    except OSError as error:
        raise CheckpointError(f"weights file {file} cannot be read ({error}); check the disk") from error
