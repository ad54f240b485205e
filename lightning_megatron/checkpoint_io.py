"""How does Lightning's checkpoint dict travel with a sharded checkpoint? Its plain part goes into ``meta.pt``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.engine import checkpoint as engine_checkpoint
from lightning_megatron.engine.checkpoint import RunState
from lightning_megatron.engine.checkpoint_save import plain_bytes
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.errors import CheckpointError

_TRAINING_STATE = ("loops", "callbacks", "lr_schedulers", "optimizer_states")
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def plain_state(lightning_state: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dict in types that can be read back without running code, as far as they have such a form."""
    plain: dict[str, Any] = as_plain_data({k: v for k, v in lightning_state.items() if k not in _HYPER_PARAMETERS})
    for name in _HYPER_PARAMETERS:
        if name in lightning_state:
            plain[name] = _plain_hyper_parameters(lightning_state[name])
    return plain


def check_plain(meta: Mapping[str, Any]) -> None:
    """Raise if rank 0 cannot write ``meta`` because of what a user has put into it; every rank must call.

    Raises:
        CheckpointError: On all ranks.
    """

    def check() -> None:
        if dist.get_rank() == 0:
            plain_bytes(meta)

    on_all_ranks_alike(check)


def load_lightning_checkpoint(run: RunState, path: Path) -> dict[str, Any]:
    """Load the sharded part into ``run`` and return Lightning's dict; every rank must call.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged, unsafe or of another model.
    """
    path = engine_checkpoint.recover(path)
    meta = engine_checkpoint.read_meta(path)
    has_random_states = engine_checkpoint.load(run, meta, path)
    if run.optimizer is not None and not has_random_states:
        here = engine_checkpoint.layout_of(run.topology)
        rank_zero_warn(
            f"{path} was written at {_sizes(meta['layout'])} and this run is at {_sizes(here)}: weights, optimizer, "
            "schedule and order of samples go on, but the random states of the ranks do not, so dropout draws other "
            "numbers than it would have; resume at the same sizes to go on exactly"
        )
    lightning_state: dict[str, Any] = meta["lightning"]
    _close_finished_epoch(lightning_state)
    return lightning_state


def _sizes(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size or 1}" for name, size in layout.items())


def only_weights(lightning_state: Mapping[str, Any], datamodule: object) -> dict[str, Any]:
    """Lightning's dict as of a run that has not begun: no steps, callbacks, schedules or place in the data.

    Args:
        lightning_state: The dict of a checkpoint.
        datamodule: This run's, whose state in the dict is its place in the data; None if there is none.
    """
    dropped = (*_TRAINING_STATE, type(datamodule).__qualname__)
    fresh = {k: v for k, v in lightning_state.items() if k not in dropped}
    return {**fresh, "epoch": 0, "global_step": 0, "lr_schedulers": [], "optimizer_states": []}


def loader_state(lightning_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where the training data stood, if there was one ``ResumableLoader``."""
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    states = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states[0] if len(states) == 1 and "random_state" in states[0] else None


def check_place_in_data(lightning_state: dict[str, Any], datamodule: object, path: Path) -> None:
    """Compare whose place in the training data a checkpoint holds with the run's data; take out what is of no use.

    Raises:
        CheckpointError: If both have a data module, of different kinds.
    """
    from lightning_megatron.datamodules.base import MegatronDataModule

    here = type(datamodule).__qualname__ if isinstance(datamodule, MegatronDataModule) else None
    states = {name: state for name, state in lightning_state.items() if isinstance(state, Mapping)}
    # A conversion writes the state of each of our data modules, without an order.
    there = [name for name, state in states.items() if state.get("train_order") is not None]
    if here in states or not (here or there):
        return
    if here and there:
        raise CheckpointError(
            f"data of checkpoint {path}: expected {here}, got {' or '.join(there)}; resume with the same kind, or "
            "begin a new run with the weights: MegatronStrategy(load_weights_only=True)"
        )
    lightning_state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
    rank_zero_warn(f"{path} holds no place in the data of {here or 'this loader'}: the training data begins anew")


def _close_finished_epoch(lightning_state: dict[str, Any]) -> None:
    """Have the next epoch begin at its first batch, if the last one was finished.

    Lightning 2.6.6 (loops/training_epoch_loop.py:reset) resumes a run that ``max_steps`` ended at an epoch's end with
    one stray batch of the finished epoch, and begins the next epoch's order anew after it.
    """
    if loader_state(lightning_state) is None:
        return
    fit_loop = lightning_state["loops"]["fit_loop"]
    epochs, batches = fit_loop["epoch_progress"]["total"], fit_loop["epoch_loop.batch_progress"]
    if epochs["completed"] == epochs["ready"] and batches["is_last_batch"]:
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def as_plain_data(value: Any) -> Any:
    """The same value in the types that can be read back without running code: containers, numbers, strings, tensors.

    What has no such form is returned as it is; writing the checkpoint then fails with its name.
    """
    if isinstance(value, Mapping):
        return {as_plain_data(k): as_plain_data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_plain_data(v) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Enum):  # also those that are numbers or strings, of which files would name the class
        return as_plain_data(value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Path):
        return str(value)
    return bytes(value) if isinstance(value, bytearray) else value


_PLAIN = (bool, int, float, str, type(None), torch.Tensor)


def _plain_hyper_parameters(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters are for people to read, so an object among them is kept as its text."""
    plain = as_plain_data(hyper_parameters)
    for name, value in plain.items():
        if not _is_plain(value):
            rank_zero_warn(f"hyper-parameter {name!r} is a {type(value).__name__}; the checkpoint keeps its text only")
            plain[name] = repr(value)
    return dict(plain)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, _PLAIN)
