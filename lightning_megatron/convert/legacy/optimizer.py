"""Which moments belong to which parameter in the optimizer of a legacy checkpoint?

Torch's optimizers number their parameters, and Megatron-LM gives them in two groups: those that decay (matrices), then
those that do not (biases and norms), each in the order of the model's modules. With 16-bit weights the float32 copies
stand beside, group by group. Every shape is compared; where one does not fit nothing is guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.convert.legacy.gathered_optimizer import gathered_moments
from lightning_megatron.convert.legacy.layout import RankFiles
from lightning_megatron.convert.legacy.rank_state import RankState
from lightning_megatron.convert.legacy.stacking import Parameter, Shards, Stacked, States
from lightning_megatron.convert.legacy.stored_state import Unclear, handle_of, list_of, mapping_of, plain
from lightning_megatron.convert.pickled.tensor_handle import TensorHandle
from lightning_megatron.convert.stored.base import Key, State, Training

_INNER = ("optimizer", "optimizer_state_dict")
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
"""Where torch's state and the float32 copies are if weights are of 16 bits; the second ones until 2020."""
_SCHEDULERS = ("opt_param_scheduler", "lr_scheduler")
_MOMENTS: tuple[State, ...] = ("exp_avg", "exp_avg_sq")
_STATES: tuple[State, ...] = ("param", *_MOMENTS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A parameter group of a rank, and which of its parameters it has."""

    members: Sequence[int]
    """Numbers of parameters, in the order of the group."""
    identities: Sequence[Any]
    """Under which the optimizer keeps their state."""
    options: Mapping[str, Any]
    """Of the group, with ``wd_mult``."""
    masters: Sequence[TensorHandle]
    """Float32 copies of those that have one."""


def read_training(files: RankFiles, states: States, stacked: Stacked) -> tuple[Training | None, dict[Key, Shards]]:
    """Where the run was, and the shards of its moments and float32 copies.

    Returns:
        None for weights alone. Without moments, if there are none or they are of an unknown kind (which is logged).
    """
    first = states[0, 0]
    iteration = _whole_number(first.others.get("iteration")) or _whole_number(first.arguments.get("iteration")) or 0
    moments: dict[Key, Shards] = {}
    groups: tuple[Mapping[str, Any], ...] = ()
    has_moments = any(_optimizer(state) for state in states.values())
    if has_moments or (files.has_distributed_optimizer and iteration):  # a release has files without moments
        read = _read_all if has_moments else gathered_moments
        try:
            moments, groups = read(files, states, stacked)
        except Unclear as reason:
            _log.warning("the optimizer state of %s is left out: %s", files.path, reason)
    elif isinstance(first.others.get("optimizer"), list):
        _log.warning("the optimizer state of %s is left out: it is that of several optimizers", files.path)
    if not iteration and not groups:
        return None, {}
    schedule = next((first.others[name] for name in _SCHEDULERS if isinstance(first.others.get(name), Mapping)), None)
    training = Training(
        iteration=iteration,
        consumed_samples=_whole_number(first.arguments.get("consumed_train_samples")),
        param_groups=groups,
        lr_scheduler=None if schedule is None else plain(schedule),
    )
    return training, moments


def _read_all(
    files: RankFiles, states: States, stacked: Stacked
) -> tuple[dict[Key, Shards], tuple[Mapping[str, Any], ...]]:
    moments: dict[Key, Shards] = {}
    options: dict[float, Mapping[str, Any]] = {}
    for stage, parameters in enumerate(stacked.stages):
        of_ranks = [
            _of_rank(files.rank_name(tensor, stage), states[tensor, stage], parameters, tensor)
            for tensor in range(files.tp)
        ]
        options |= {group.options["wd_mult"]: group.options for group in _groups(states[0, stage], parameters, 0)}
        for number, parameter in enumerate(parameters):
            if not parameter.is_copy:
                for state in _STATES:
                    moments[parameter.key._replace(state=state)] = tuple(each[number, state] for each in of_ranks)
    return moments, tuple(options[multiple] for multiple in sorted(options, reverse=True))


def _of_rank(
    name: str, state: RankState, parameters: Sequence[Parameter], tensor: int
) -> dict[tuple[int, State], TensorHandle]:
    """The moments and the float32 copy of each parameter of a rank, by its number."""
    optimizer = _optimizer(state)
    if optimizer is None:
        raise Unclear(f"{name} has none")
    found: dict[tuple[int, State], TensorHandle] = {}
    kept = mapping_of(optimizer.get("state"))
    for group in _groups(state, parameters, tensor):
        masters = iter(group.masters)
        for number, identity in zip(group.members, group.identities, strict=True):
            weight = parameters[number].shards[tensor]
            for moment in _MOMENTS:
                found[number, moment] = handle_of(mapping_of(kept.get(identity)).get(moment))
            found[number, "param"] = weight if weight.dtype == torch.float32 else handle_of(next(masters, None))
            for each in _STATES:
                if found[number, each].shape != weight.shape:
                    raise Unclear(f"{each} of parameter {number} in {name} has another shape than the parameter")
    if len(found) != 3 * len(parameters):
        raise Unclear(f"{name} has {len(found) // 3} of {len(parameters)} parameters in its groups")
    return found


def _groups(state: RankState, parameters: Sequence[Parameter], tensor: int) -> list[_Group]:
    """Which parameters each group of a rank has: by the shapes of their moments, in order."""
    optimizer = _optimizer(state) or {}
    kept = mapping_of(optimizer.get("state"))
    shapes = [parameter.shards[tensor].shape for parameter in parameters]
    kinds = {
        1.0: [number for number, shape in enumerate(shapes) if len(shape) > 1],
        0.0: [number for number, shape in enumerate(shapes) if len(shape) <= 1],
    }
    stored_optimizer = state.others["optimizer"]
    masters = list_of(next((stored_optimizer[name] for name in _MASTERS if name in stored_optimizer), []))
    groups = []
    for place, stored in enumerate(list_of(optimizer.get("param_groups"))):
        identities = list_of(mapping_of(stored).get("params"))
        if not identities:
            continue
        theirs = [handle_of(mapping_of(kept.get(each)).get("exp_avg")).shape for each in identities]
        multiple = next((m for m, members in kinds.items() if theirs == [shapes[n] for n in members]), None)
        if multiple is None:
            raise Unclear(f"parameter group {place} holds neither all matrices nor all biases and norms")
        options = plain(stored) | {"wd_mult": multiple, "lr_mult": float(stored.get("lr_mult", 1.0))}
        step = mapping_of(kept[identities[0]]).get("step", options.get("step"))
        if isinstance(step, TensorHandle):
            step = step.whole().item()
        groups.append(
            _Group(
                members=kinds[multiple],
                identities=identities,
                options=options | ({} if step is None else {"step": int(step)}),
                masters=list_of(masters[place]) if place < len(masters) else (),
            )
        )
    return groups


# ---- what is stored -------------------------------------------------------------------------------------------------


def _optimizer(state: RankState) -> Mapping[str, Any] | None:
    """Torch's state of a rank's optimizer, if it has moments; with 16-bit weights it is one level deeper."""
    stored = state.others.get("optimizer")
    if isinstance(stored, Mapping):
        stored = next((stored[name] for name in _INNER if isinstance(stored.get(name), Mapping)), stored)
    return stored if isinstance(stored, Mapping) and stored.get("state") else None


def _whole_number(stored: Any) -> int | None:
    return stored if type(stored) is int and stored >= 0 else None
