"""The table of what changes in Megatron's checkpoint writer and reader while they work.

The writer starts a ``spawn`` manager process, which runs the user's script again (a hang without ``__main__`` guard);
what it would do with it is done by threads in checkpoint_files.py. The reader unpickles objects without restriction,
or reads files again that were checked before; here only what is checked while it is read comes out.
"""

from __future__ import annotations

import io
import pickle
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.checkpoint_files import torch_bytes
from lightning_megatron.engine.checkpoint_safety import COMMON, check_not_packed, load_plain, more_than_data, read_table
from lightning_megatron.engine.patching import Patch
from lightning_megatron.errors import CheckpointError

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _results_queue(original: Any) -> Callable[[], queue.Queue[Any]]:
    shared: queue.Queue[Any] = queue.Queue()
    return lambda: shared


def _load_only_data(original: Any) -> Any:
    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        """As torch's, of the data that is in the bytes, written anew: two readers may differ in what bytes mean."""
        name = read_item.dest_index.fqn
        try:
            check_not_packed(value)
            data = torch.load(value, weights_only=True)
        except CheckpointError as error:
            raise CheckpointError(f"its entry {name}: {error}; do not trust its source") from None
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"its entry {name}: {more_than_data(error)}; do not trust its source") from None
        except Exception as error:  # torch raises RuntimeError, EOFError, KeyError ... on damaged archives
            raise CheckpointError(f"its entry {name} is damaged ({type(error).__name__})") from None
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
)
"""Active around every save and load."""
