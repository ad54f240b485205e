"""How does a sharded run come back, exactly, on the same or on another layout?

A checkpoint is a directory in Megatron's distributed format, which any tp, pp, vpp and dp can load, plus one file per
rank with its random states, ``checksums.json``, and ``meta.pt`` with everything that is not sharded. How it is written
is in checkpoint_save.py, how it gets its name in files.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from lightning_megatron.engine.checkpoint_checksums import CHECKSUMS, verify_checksums
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_safety import META, check_complete, check_only_data, load_plain
from lightning_megatron.engine.checkpoint_save import PendingSave, begin_save, release_host_memory, save
from lightning_megatron.engine.checkpoint_state import (
    FORMAT_VERSION,
    OWN_KEYS,
    RunState,
    check_fits,
    layout_of,
    rng_file,
    sharded_state,
)
from lightning_megatron.engine.checkpoint_swap import is_own_within
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.optimizer_state import restore_optimizer_state
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import recover, remove, wait_for_deletions

__all__ = [
    "PendingSave",
    "RunState",
    "begin_save",
    "is_own_within",
    "layout_of",
    "load",
    "read_meta",
    "recover",
    "release_host_memory",
    "remove",
    "save",
    "wait_for_deletions",
]


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.pt`` of a complete, undamaged checkpoint that is only data; every rank must call, and all raise alike.

    All bytes are compared with their checksums first, shared out over the ranks.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged or could run code.
    """

    def check_own_share() -> None:
        check_complete(path)
        verify_checksums(path, (dist.get_rank(), dist.get_world_size()))

    def check_and_read() -> dict[str, Any]:
        check_only_data(path)
        meta = load_plain(path / META)
        if not isinstance(meta, dict) or not meta.keys() >= OWN_KEYS:
            raise CheckpointError(f"checkpoint {path} was written by another strategy; give one of MegatronStrategy's")
        version = meta["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has the format version {version}, and this program reads {FORMAT_VERSION}; load "
                "it with the version that wrote it"
            )
        if meta.get("has_checksums") and not (path / CHECKSUMS).is_file():
            raise CheckpointError(f"checkpoint {path} lacks its file {CHECKSUMS}: it is damaged; use an earlier one")
        return meta

    on_all_ranks_alike(check_own_share)
    return on_all_ranks_alike(check_and_read)


def load(run: RunState, meta: Mapping[str, Any], path: Path) -> bool:
    """Load weights, and optimizer and random states if ``run`` has an optimizer; every rank must call.

    The engine's random states are per rank and only come back on the layout that wrote them; on another one, the
    user's streams go on as those of rank 0 did.

    Returns:
        Whether the engine's random states came back.

    Raises:
        CheckpointError: If the checkpoint is of another model, or has no optimizer state although one is wanted.
    """
    same_layout: bool = meta["layout"] == layout_of(run.topology)

    def check_and_read_random_states() -> dict[str, Any]:
        check_fits(run, meta, path)
        rank = dist.get_rank() if same_layout else 0
        return {} if run.optimizer is None else dict(load_plain(path / rng_file(rank)))

    random_states = on_all_ranks_alike(check_and_read_random_states)
    with torch.no_grad():
        state = sharded_state(run, loaded_from=meta)
        with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
            loaded = dist_checkpointing.load(state, str(path))
        for index, chunk in enumerate(run.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
        if run.optimizer is not None:
            restore_optimizer_state(run.optimizer, loaded["optimizer"])
    if run.optimizer is None:
        return False
    if same_layout:
        run.rng.load_state_dict(random_states)
    else:
        run.rng.load_users_state(random_states)
    return same_layout
