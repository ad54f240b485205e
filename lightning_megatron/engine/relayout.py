"""How do a module's weights follow it to a Trainer with another layout? Through a temporary sharded checkpoint.

Megatron's groups are global, so the weights are written while the old ones exist and read after the new ones do.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap

_PREFIX = "megatron_relayout_"


def write_weights(chunks: list[Any], parent: Path) -> Path:
    """Write the weights of ``chunks`` into a new folder below ``parent``; every rank must call.

    Returns:
        The folder, the same on every rank.
    """
    folder = [""]
    if dist.get_rank() == 0:
        parent.mkdir(parents=True, exist_ok=True)
        folder = [tempfile.mkdtemp(prefix=_PREFIX, dir=parent)]
    dist.broadcast_object_list(folder, 0)
    finish_parameter_gathers(chunks)
    dist_checkpointing.save(_state(chunks), folder[0])
    return Path(folder[0])


@torch.no_grad()
def read_weights(chunks: list[Any], folder: Path) -> None:
    """Load what ``write_weights`` wrote into chunks of another layout, and delete the folder; every rank must call."""
    loaded = dist_checkpointing.load(_state(chunks), str(folder))
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def _state(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{index}": unwrap(chunk).sharded_state_dict() for index, chunk in enumerate(chunks)}
