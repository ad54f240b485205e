"""The small files of a checkpoint: their names, and ``meta.pt``, whose presence marks a checkpoint as complete.

Nothing here communicates or imports Megatron.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.plain_data import load_plain
from lightning_megatron.checkpoint.schema import check_meta, is_meta
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.checksums import CHECKSUMS, require_file
from lightning_megatron.storage.stores import COMPLETE_MARKER

META = COMPLETE_MARKER
"""Lightning's own state and the description of the run; written last, so its presence marks a complete checkpoint."""

FORMAT_VERSION = 1
"""Version of the checkpoint format; other versions are refused."""

COMMON = "common.pt"
"""State that Megatron does not shard: parameter groups and step counts."""

TABLE = ".metadata"
"""Torch's table of contents of the shards."""
BACKENDS = "metadata.json"
"""Names the formats of the other files, by which Megatron's own loader chooses its readers."""

KNOWN_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of ``metadata.json``; without the common backend from megatron-core 0.17 on."""


def is_distributed(path: Path) -> bool:
    """Whether ``path`` is a distributed checkpoint of Megatron-Core, ours or another program's."""
    return (path / TABLE).is_file() and (path / BACKENDS).is_file()


def check_complete(path: Path) -> None:
    """Raise unless ``path`` is a complete checkpoint directory of this package.

    Raises:
        CheckpointError: If it is missing, is not a directory, or was never finished.
    """
    if not path.is_dir():
        what = "does not exist"
        if path.exists():
            what = "is a file, not a directory that this strategy wrote"
        raise CheckpointError(f"checkpoint {path} {what}; give the path of a *.ckpt directory")
    for name in (META, TABLE, BACKENDS, COMMON, CHECKSUMS):
        require_file(path / name)


def check_backends(path: Path) -> None:
    """Raise if a distributed checkpoint has another format, such as older ones of Megatron-Core.

    Raises:
        CheckpointError: If the format is another one, or cannot be read.
    """
    try:
        found = json.loads((path / BACKENDS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        found = repr(error)
    backends: dict[str, Any] = {}
    if isinstance(found, dict):
        backends = found
    of_shards = backends.get("sharded_backend")
    of_rest = backends.get("common_backend", "torch")
    if of_shards != "torch_dist" or of_rest != "torch":
        raise CheckpointError(
            f"checkpoint {path} has an unreadable {BACKENDS}: expected {KNOWN_BACKENDS}, got {found}; give another"
        )


def load_meta(path: Path) -> dict[str, Any]:
    """Read ``meta.pt`` of a checkpoint.

    Raises:
        CheckpointError: If another program wrote it, or a version of this one with another format.
    """
    meta = load_plain(path / META)
    if not is_meta(meta):
        raise CheckpointError(
            f"checkpoint {path} was written by another strategy; give one of MegatronStrategy's"
        )
    version = meta["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path}: format version {version}, this program reads {FORMAT_VERSION}; use its own version"
        )
    check_meta(meta, path)
    return meta
