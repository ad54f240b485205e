"""What must change in Megatron's checkpoint writer and reader? A row for each function.

The writer starts a ``spawn`` manager process, which runs the user's script again (a hang without ``__main__`` guard);
what it would do with it is done by threads in checkpoint_files.py. The reader unpickles objects without restriction;
here only plain data comes out.
"""

from __future__ import annotations

import io
import pickle
import queue
from collections.abc import Callable
from typing import Any

import torch

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_files import torch_bytes
from lightning_megatron.engine.checkpoint_safety import check_not_packed, more_than_data
from lightning_megatron.engine.patching import Patch
from lightning_megatron.errors import CheckpointError

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def _results_queue(original: Any) -> Callable[[], queue.Queue[Any]]:
    shared: queue.Queue[Any] = queue.Queue()
    return lambda: shared


def _write_common_alike(original: Any) -> Any:
    def save_common(self: Any, common_state_dict: Any, checkpoint_dir: Any) -> None:
        def write() -> None:
            with failures_as_errors("common.pt"):
                original(self, common_state_dict, checkpoint_dir)

        on_all_ranks_alike(write)

    return save_common


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
        attribute="TorchCommonSaveStrategy.save_common",
        replacement=_write_common_alike,
        engine="megatron-core 0.16.1",
        reason="rank 0 writes, and where the disk is full it raises alone while the others wait for it",
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
