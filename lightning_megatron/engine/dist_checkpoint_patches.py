"""The table of what changes in Megatron's checkpoint writer and reader while they work.

The writer starts a ``spawn`` manager process, which runs the user's script again (a hang without ``__main__`` guard);
what it would do with it is done by threads in checkpoint_files.py. The reader unpickles objects without restriction,
or reads files again that were checked before; here only what is checked while it is read comes out.
"""

from __future__ import annotations

import io
import math
import queue
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_megatron.engine.checkpoint_files import torch_bytes
from lightning_megatron.engine.checkpoint_safety import COMMON, load_plain, read_table
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.patches import Patch
from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _results_queue(original: Any) -> Callable[[], queue.Queue[Any]]:
    shared: queue.Queue[Any] = queue.Queue()
    return lambda: shared


def _load_only_data(original: Any) -> Any:
    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        """As torch's, of the data that is in the bytes, written anew: two readers may differ in what bytes mean."""
        name = read_item.dest_index.fqn
        data = read_pickle(value, foreign=False, name=f"its entry {name}")
        original(self, read_item, io.BytesIO(torch_bytes(data)))

    return load_bytes


class _TableReader(FileSystemReader):
    """Torch's, with a table of contents that was checked while it was read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._table = on_all_ranks_alike(lambda: read_table(Path(path)))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self._table


def _read_checked_table(original: Any) -> Callable[..., _TableReader]:
    return lambda checkpoint_dir, cache_metadata=False: _TableReader(checkpoint_dir)


def _load_common_checked(original: Any) -> Callable[..., Any]:
    return lambda self, checkpoint_dir: load_plain(Path(checkpoint_dir) / COMMON)


def _with_gaps(original: Any) -> Any:
    def validate_global_plan(global_plan: Any, metadata: Any) -> Any:
        """As torch's, of all but moments with gaps, where layers that are stacked with others are frozen."""
        entries = metadata.state_dict_metadata.items()
        checked = {name: entry for name, entry in entries if not (name.startswith("optimizer.") and _has_gaps(entry))}
        return original(global_plan, replace(metadata, state_dict_metadata=checked))

    return validate_global_plan


def _has_gaps(entry: Any) -> bool:
    chunks = getattr(entry, "chunks", None)
    return chunks is not None and sum(math.prod(chunk.sizes) for chunk in chunks) < math.prod(entry.size)


def _refuses_gaps(original: Any) -> Any:
    def create_local_plan(self: Any) -> Any:
        plan = original(self)
        found: Counter[str] = Counter()
        for item in plan.items:
            found[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self.state_dict.items():
            shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
            wanted = sum(shard.tensor.numel() for shard in shards)
            # A vocabulary may be larger here than there.
            if found[name] < wanted and name not in (self.allow_shape_mismatch_sharded_tensors or {}):
                raise CheckpointError(
                    f"{name}: expected {wanted} numbers for this rank, got {found[name]}; weights that were frozen "
                    "have no optimizer state: freeze the same ones, or use MegatronStrategy(load_weights_only=True)"
                )
        return plan

    return create_local_plan


DIST_CHECKPOINT_PATCHES: tuple[Patch, ...] = (
    Patch(
        module=_WRITER,
        attribute="_get_write_results_queue",
        replacement=_results_queue,
        engine="megatron-core 0.16.1",
        reason="its spawn Manager imports the user's script again and hangs without a __main__ guard",
    ),
    Patch(
        module="megatron.core.dist_checkpointing.strategies.common",
        attribute="TorchCommonLoadStrategy.load_common",
        replacement=_load_common_checked,
        engine="megatron-core 0.16.1 and torch 2.13",
        reason="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD makes torch.load unpickle what has changed since it was checked",
    ),
    Patch(
        module="megatron.core.dist_checkpointing.strategies.torch",
        attribute="_get_filesystem_reader",
        replacement=_read_checked_table,
        engine="megatron-core 0.16.1 and torch 2.13",
        reason="torch's reader unpickles the table of contents without restriction",
    ),
    Patch(
        module="megatron.core.dist_checkpointing.strategies.torch",
        attribute="MCoreLoadPlanner.load_bytes",
        replacement=_load_only_data,
        engine="megatron-core 0.16.1 and torch 2.13",
        reason="torch's planner unpickles with weights_only=False, so a checkpoint could run code",
    ),
    Patch(
        module="torch.distributed.checkpoint.default_planner",
        attribute="_validate_global_plan",
        replacement=_with_gaps,
        engine="torch 2.13",
        reason="it refuses to save the moments of stacked layers some of which are frozen",
    ),
    Patch(
        module="megatron.core.dist_checkpointing.strategies.torch",
        attribute="MCoreLoadPlanner.create_local_plan",
        replacement=_refuses_gaps,
        engine="megatron-core 0.16.1 and torch 2.13",
        reason="numbers that are not in the files would stay what they were in memory",
    ),
)
"""Active around every save and load."""
