"""Megatron's loader of sharded tensors, without running code.

Megatron and torch plan which rank reads what. Their readers unpickle without restriction, or read files again that were
checked before: here they get only what was checked while it was read.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_megatron.checkpoint.meta import COMMON, check_backends
from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.checkpoint.plain_data import load_plain
from lightning_megatron.checkpoint.state import AllPageable
from lightning_megatron.checkpoint.table import read_table, table_reader
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.failures import failures_as_errors


def load_sharded(
    state: dict[str, Any],
    path: Path,
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    may_lack_elements: bool = False,
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Load as ``dist_checkpointing.load`` of megatron-core 0.16 to 0.19, without running code; every rank must call.

    From 0.17 on its strategies read the common part by themselves, with ``torch.load`` as the environment configures
    it.

    Args:
        state: Sharded tensors to load into.
        path: The checkpoint.
        strict: What to do about names that only one of both has.
        may_lack_elements: Whether elements that are in no file keep their values, instead of raising an error.

    Returns:
        The loaded state; names in the checkpoint that ``state`` lacks; names in ``state`` that the checkpoint lacks.
    """
    with raise_on_all_ranks():
        check_backends(path)
        loaded = load_plain(path / COMMON)
        table = read_table(path)
    with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
        prepared, non_persistent, factories = load_preprocess(state)
        merge(loaded, non_persistent)
        sharded, _ = extract_sharded_base(prepared)
        local_metadata, global_metadata = determine_global_metadata(sharded)
        sharded, unexpected, missing = validate_integrity_and_strict_load(
            sharded, strict, True, local_metadata, global_metadata, _entries(path, table)
        )
        reader = table_reader(path, table)
        merge(loaded, _read_shards(sharded, reader, may_lack_elements=may_lack_elements))
        apply_factory_merges(loaded, factories)
    return loaded, unexpected, missing


def _entries(path: Path, table: Metadata) -> dict[str, Any]:
    """Entries of the checkpoint as Megatron describes them."""
    entries = table.state_dict_metadata.items()
    objects = [
        ShardedObject.empty_from_unique_key(key)
        for key, entry in entries
        if isinstance(entry, BytesStorageMetadata)
    ]
    tensors: dict[str, Any] = torch_dist.TorchDistLoadShardedStrategy().load_tensors_metadata(
        path, table
    )
    return {each.unique_key: each for each in objects} | tensors


def _read_shards(
    state: dict[str, Any],
    reader: FileSystemReader,
    *,
    may_lack_elements: bool,
) -> dict[str, Any]:
    """Read shards as Megatron's ``TorchDistLoadShardedStrategy.load``, with a reader and a planner that run no code."""
    weights = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    planner_class = _LenientLoadPlanner if may_lack_elements else _LoadPlanner
    planner = planner_class(
        shapes_validation_sharded_tensors=[
            each for each in weights if not each.allow_shape_mismatch
        ],
        allow_shape_mismatch_sharded_tensors={
            each.key: each for each in weights if each.allow_shape_mismatch
        },
    )
    by_key, flat_mapping, rename_mapping = torch_dist._replace_state_dict_keys_with_sharded_keys(
        state
    )
    with AllPageable():
        tensors = torch_dist.mcore_to_pyt_state_dict(by_key, True)
    _load_state_dict(tensors, storage_reader=reader, planner=planner)
    unwrapped = {
        name: torch_dist._unwrap_pyt_sharded_tensor(value) for name, value in tensors.items()
    }
    loaded: dict[str, Any] = torch_dist._replace_sharded_keys_with_state_dict_keys(
        unwrapped, flat_mapping, rename_mapping
    )
    torch_dist._restore_dict_types(loaded, state)
    return loaded


class _LenientLoadPlanner(torch_dist.MCoreLoadPlanner):
    """Megatron's planner without code: elements that are not in the files keep their values in memory."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """As torch's, on plain data that was read and serialized again: two readers may interpret bytes differently."""
        data = read_pickle(value, foreign=False, name=f"its entry {read_item.dest_index.fqn}")
        stream = io.BytesIO()
        torch.save(data, stream)
        stream.seek(0)
        super().load_bytes(read_item, stream)


class _LoadPlanner(_LenientLoadPlanner):
    def create_local_plan(self) -> Any:
        """As Megatron's, but raises for elements that are not in the files: they would keep their values in memory."""
        plan = super().create_local_plan()
        planned: Counter[str] = Counter()
        for item in plan.items:
            planned[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self.state_dict.items():
            shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
            expected = sum(shard.tensor.numel() for shard in shards)
            # The model's vocabulary may be larger than the checkpoint's.
            if planned[name] < expected and name not in (
                self.allow_shape_mismatch_sharded_tensors or {}
            ):
                raise CheckpointError(
                    f"{name}: expected {expected} elements on this rank, got {planned[name]}; weights that were frozen "
                    "have no optimizer state: freeze the same ones, or use MegatronStrategy(load_weights_only=True)"
                )
        return plan
