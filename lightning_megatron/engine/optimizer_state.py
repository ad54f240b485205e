"""The optimizer's state in a checkpoint: sharded tensors that do not depend on the layout.

Checkpoints hold, for each parameter, the entries ``optimizer.state.{param,exp_avg,exp_avg_sq}.NAME`` in the shape of
the weight: its fp32 master weight and its moments, as in megatron-core's ``fully_reshardable`` format. So a run can be
resumed with or without distributed optimizer, at any data-parallel size and in another precision. megatron-core 0.16.1
(optimizer/distrib_optimizer.py) writes that format by gathering everything on every rank, and its optimizers without
sharding write other names. Here each rank writes and reads exactly what it holds: its shard of a parameter is a range
of consecutive elements, which is cut into boxes (rest of a row, complete rows, start of a row).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from lightning_megatron.engine.entries import EMA

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Keys that identify a parameter group; each rank has all groups, in any order."""

_GROUP_SETTINGS = (
    "max_lr",
    "min_lr",
    "start_wd",
    "end_wd",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
)
"""Keys of parameter groups that each run sets; the others, such as ``lr`` and ``step``, are restored on resume."""

_CHANGEABLE = ("weight_decay", "betas", "eps", "momentum")
"""Those of them that updates use, which schedulers of momentum and callbacks may change."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each axis."""


class ParamState(NamedTuple):
    """State that this rank's optimizer holds of one parameter."""

    parameter: Tensor
    start: int
    """Index of the first element held, in row-major order."""
    is_sharded: bool
    """Whether other data-parallel ranks hold other elements, instead of the same ones."""
    tensors: Mapping[str, Tensor]
    """``param``, the master weight, and the moments by name; each [elements held], perhaps in host memory."""

    @property
    def stop(self) -> int:
        """Index after the last element held."""
        return self.start + self.tensors["param"].numel()

    @property
    def is_own_master(self) -> bool:
        """Whether the master weight is the weight itself, as in fp32."""
        master = self.tensors["param"].untyped_storage().data_ptr()
        return bool(self.parameter.untyped_storage().data_ptr() == master)


def param_states(parts: Iterable[Any]) -> Iterator[ParamState]:
    """This rank's state of each parameter of Megatron's optimizers, in a fixed order."""
    for part in parts:
        is_sharded = isinstance(part, DistributedOptimizer)
        for parameter, master, start in master_weights(part):
            tensors = {"param": part.optimizer.master_of(master).detach().view(-1)}
            for name in part.optimizer.state_names_of(master):
                moment = part.optimizer.state[master][name]
                tensors[name] = moment.view(-1)
            yield ParamState(parameter, start, is_sharded, tensors)


def sharded(
    parts: Iterable[Any],
    models: Mapping[str, Any],
    *,
    is_loading: bool,
) -> dict[str, ShardedTensor]:
    """Sharded tensors of all masters and moments, which view the live state.

    Args:
        parts: Megatron's optimizers.
        models: Sharded state dict of all chunks, with the parameters themselves as data.
        is_loading: Whether fp32 masters, which are the weights, get memory of their own.
    """
    placements = _placements(models)
    entries: dict[str, ShardedTensor] = {}
    for number, held in enumerate(param_states(parts)):
        for name, tensor in held.tensors.items():
            has_own_memory = is_loading and name == "param" and held.is_own_master
            if has_own_memory:
                tensor = torch.empty_like(tensor)
            placed = placements[id(held.parameter)]
            shards = _shards(placed, held, tensor, f"optimizer.state.{name}")
            for index, shard in enumerate(shards):
                entries[f"{number}.{name}.{index}"] = shard
    return entries


def sharded_average(
    states: Sequence[ParamState],
    averages: Sequence[Tensor],
    models: Mapping[str, Any],
) -> dict[str, ShardedTensor]:
    """Sharded tensors of an average of the master weights, which view it.

    Args:
        states: What this rank's optimizer holds of each parameter.
        averages: The average of each master weight's elements, in the same order; each [elements held].
        models: Sharded state dict of all chunks, with the parameters themselves as data.
    """
    placements = _placements(models)
    entries: dict[str, ShardedTensor] = {}
    for number, (held, average) in enumerate(zip(states, averages, strict=True)):
        placed = placements[id(held.parameter)]
        for index, shard in enumerate(_shards(placed, held, average, EMA.removesuffix("."))):
            entries[f"{number}.{index}"] = shard
    return entries


def copy_masters(parts: Iterable[Any], entries: Mapping[str, Any]) -> None:
    """Copy loaded fp32 masters, which had memory of their own, into the weights that they are.

    Args:
        parts: Megatron's optimizers.
        entries: Result of ``sharded``, with the loaded tensors in place of their descriptions.
    """
    for number, held in enumerate(param_states(parts)):
        prefix = f"{number}.param."
        keys = [key for key in entries if key.startswith(prefix)]
        if held.is_own_master and keys:
            keys.sort(key=lambda key: int(key.removeprefix(prefix)))
            pieces = [entries[key].flatten() for key in keys]
            held.tensors["param"].copy_(torch.cat(pieces))


def restore_groups(groups: Iterable[dict[str, Any]], saved: Iterable[Mapping[str, Any]]) -> None:
    """Restore what training has changed in the parameter groups; the settings of this run are kept."""
    saved_by_key = {group_key(group): group for group in saved}
    for group in groups:
        kept = {"params", *(name for name in _GROUP_SETTINGS if name in group)}
        for name, value in saved_by_key[group_key(group)].items():
            if name not in kept:
                group[name] = value


def settings_of(groups: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Settings of parameter groups that a run may change while it trains, by what identifies a group."""
    return {
        group_key(group): {name: group[name] for name in _CHANGEABLE if name in group}
        for group in groups
    }


def gather_weights(parts: Iterable[Any]) -> None:
    """All-gather fp32 weights, which are the masters, after each data-parallel rank has restored its shard of them."""
    for part in parts:
        if isinstance(part, DistributedOptimizer) and part.config.params_dtype is torch.float32:
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)


def group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a parameter group, of which each rank has all, in any order."""
    return tuple(group[name] for name in _GROUP_IDENTITY)


def master_weights(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each parameter, its master weight or this rank's shard of it, and the index of its first element."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            first: int = part._get_model_param_range_map(parameter)["param"].start
            yield parameter, part.optimizer.param_groups[group]["params"][order], first
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        groups = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
        for parameters, masters in groups:
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, master, 0
        for parameters in part.fp32_from_fp32_groups:
            for parameter in parameters:
                yield parameter, parameter, 0
    else:
        for parameter in part.get_parameters():
            yield parameter, parameter, 0


def _placements(models: Mapping[str, Any]) -> dict[int, list[ShardedTensor]]:
    """Map each parameter's ``id`` to its position in the full model: one sharded tensor, or several."""
    tensors, _ = extract_sharded_tensors_and_factories(dict(models))
    placements = {}
    for placement in nested_values(tensors):
        parts = [placement]
        if isinstance(placement, ShardedTensorFactory):
            parts = list(nested_values(placement.build()))
        placements[id(placement.data)] = parts
    return placements


def _shards(
    placements: Sequence[ShardedTensor],
    held: ParamState,
    flat: Tensor,
    name: str,
) -> Iterator[ShardedTensor]:
    """Sharded tensors of the full model that make up ``flat``, the held elements of a state tensor, in its order."""
    for placement in placements:
        data = placement.data
        assert data is not None
        assert data.is_contiguous(), "shards of a parameter are contiguous"
        begin = data.storage_offset() - held.parameter.storage_offset()
        start = max(held.start, begin)
        stop = min(held.stop, begin + data.numel())
        replica = placement.replica_id
        if held.is_sharded:
            # The last component is the data-parallel rank: of ranks that hold the same elements, the first one writes.
            replica = (*replica[:2], 0)
        prepended = placement.prepend_axis_num
        for offset, size in boxes(tuple(data.shape), start - begin, stop - begin):
            shape = (1,) * prepended + size
            inside = (0,) * prepended + offset
            offsets = zip(placement.global_offset, inside, strict=True)
            count = math.prod(size)
            elements = flat[start - held.start :][:count]
            yield ShardedTensor(
                key=f"{name}.{placement.key}",
                data=elements.view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=placement.global_shape,
                global_offset=tuple(sum(pair) for pair in offsets),
                axis_fragmentations=None,
                replica_id=replica,
                allow_shape_mismatch=placement.allow_shape_mismatch,
            )
            start += count


def boxes(
    shape: tuple[int, ...],
    start: int,
    stop: int,
) -> list[Box]:
    """Split elements ``start`` to ``stop`` of a tensor, in row-major order, into few boxes in the same order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    inner = shape[1:]
    row = math.prod(inner)
    first = -(-start // row)
    last = stop // row

    def within(
        index: int,
        begin: int,
        end: int,
    ) -> list[Box]:
        found = boxes(inner, begin, end)
        return [((index, *offset), (1, *size)) for offset, size in found]

    if first > last:
        return within(last, start - last * row, stop - last * row)
    start_of_row = within(last, 0, stop - last * row)
    rest_of_row = within(first - 1, start - (first - 1) * row, row)
    if first == last:
        return rest_of_row + start_of_row
    origin = (0,) * len(inner)
    rows = ((first, *origin), (last - first, *inner))
    return [*rest_of_row, rows, *start_of_row]
