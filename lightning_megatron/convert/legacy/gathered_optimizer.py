"""Where are a parameter's moments in ``distrib_optim.pt``, which Megatron-LM's distributed optimizer of 2023 wrote?

The first data-parallel rank gathered what was spread: for each kind one long tensor, in the order of the gradient
buffer. That has the parameters from the last to the first, and ends with what makes it a multiple of the data-parallel
size. Later releases cut it into buckets with gaps, which no file describes: they are not read. Whether the order is
right shows in the float32 copies, which rounded are the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.legacy.layout import RankFiles
from lightning_megatron.convert.legacy.stacking import Parameter, Shards, Stacked, States
from lightning_megatron.convert.legacy.stored_state import Unclear, handle_of, list_of, mapping_of, plain
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.pickled.unpickler import load_pickled
from lightning_megatron.convert.stored.base import Key, State

FILE = "distrib_optim.pt"

_STATES: tuple[State, ...] = ("param", "exp_avg", "exp_avg_sq")
_ROWS_COMPARED = 64


def gathered_moments(
    files: RankFiles, states: States, stacked: Stacked
) -> tuple[dict[Key, Shards], tuple[Mapping[str, Any], ...]]:
    """The shards of all moments and float32 copies, and the parameter groups.

    Raises:
        Unclear: If their order is not known.
        CheckpointError: If a file is damaged or unsafe.
    """
    copies = states[0, 0].arguments.get("data_parallel_size")
    if type(copies) is not int or len(states[0, 0].chunks) > 1:
        raise Unclear("it is not known how many copies of the model there were, or there are several model chunks")
    moments: dict[Key, Shards] = {}
    for stage, parameters in enumerate(stacked.stages):
        of_ranks = []
        for tensor in range(files.tp):
            file = files.parts[tensor, stage].path.with_name(FILE)
            if not file.is_file():
                raise Unclear(f"{files.rank_name(tensor, stage)} has no {FILE}")
            of_ranks.append(_of_rank(file, parameters, tensor, copies))
        for number, parameter in enumerate(parameters):
            if not parameter.is_copy:
                for state in _STATES:
                    moments[parameter.key._replace(state=state)] = tuple(each[number, state] for each in of_ranks)
    return moments, _groups(mapping_of(states[0, 0].others.get("optimizer")))


def _of_rank(
    file: Path, parameters: list[Parameter], tensor: int, copies: int
) -> dict[tuple[int, State], TensorHandle]:
    buffers = mapping_of(mapping_of(load_pickled(file)).get(0))
    if len(buffers) != 1:
        raise Unclear(f"{file} has {len(buffers)} buffers")
    (buffer,) = buffers.values()
    long = {state: handle_of(mapping_of(buffer).get(state)) for state in _STATES}
    total = sum(parameter.shards[tensor].numel for parameter in parameters)
    if any(each.shape != long["param"].shape or not 0 <= each.numel - total < copies for each in long.values()):
        raise Unclear(f"{file} has {long['param'].numel:,} numbers for parameters of {total:,}")
    found: dict[tuple[int, State], TensorHandle] = {}
    first = 0
    for number in reversed(range(len(parameters))):
        weight = parameters[number].shards[tensor]
        for state in _STATES:
            found[number, state] = long[state].viewed(weight.shape, first)
        first += weight.numel
        rows = min(_ROWS_COMPARED, weight.shape[0])
        if not torch.equal(found[number, "param"].rows(0, rows).to(weight.dtype), weight.rows(0, rows)):
            raise Unclear(f"the float32 copies in {file} are not in the order of the weights")
    return found


def _groups(stored: Mapping[Any, Any]) -> tuple[Mapping[str, Any], ...]:
    groups = [plain(mapping_of(each)) for each in list_of(mapping_of(stored.get("optimizer")).get("param_groups"))]
    for group in groups:
        group.setdefault("wd_mult", 1.0 if group.get("weight_decay") else 0.0)
    if sorted(group["wd_mult"] for group in groups) != [0.0, 1.0]:
        raise Unclear("its parameter groups are not one that decays and one that does not")
    return tuple(groups)
