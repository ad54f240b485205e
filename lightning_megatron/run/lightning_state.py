"""Lightning's own dict in a checkpoint: what of it a run that loads it must not take as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.errors import (
    CheckpointError,
)
from lightning_megatron.storage.paths import is_remote

if TYPE_CHECKING:
    pass

_TRAINING_STATE = ("loops", "callbacks", "lr_schedulers", "optimizer_states")


def without_training_state(
    lightning_state: Mapping[str, Any], datamodule: object
) -> dict[str, Any]:
    """Lightning's dict as before a run: without steps, callbacks, schedules and position in the training data.

    Args:
        lightning_state: The dict of a checkpoint.
        datamodule: This run's data module, whose state in the dict is the position in the data; None if there is none.
    """
    dropped = (*_TRAINING_STATE, type(datamodule).__qualname__)
    fresh = {k: v for k, v in lightning_state.items() if k not in dropped}
    return {**fresh, "epoch": 0, "global_step": 0, "lr_schedulers": [], "optimizer_states": []}


def forget_addresses(lightning_state: Mapping[str, Any], trusted: Iterable[Path]) -> None:
    """Remove addresses of object stores from the states of callbacks: they would be opened when Lightning uses them.

    Args:
        lightning_state: The dict of a checkpoint, changed in place.
        trusted: Directories whose files may be named: that of the checkpoint, and those of the run's callbacks.
    """
    folders = [str(folder).rstrip("/") for folder in trusted if is_remote(folder)]

    def is_foreign(value: object) -> bool:
        if not isinstance(value, str) or ("://" not in value and "::" not in value):
            return False
        is_within = any(value == folder or value.startswith(f"{folder}/") for folder in folders)
        return not is_within or "/.." in value

    callbacks = lightning_state.get("callbacks")
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if not isinstance(state, dict):
            continue
        foreign = [key for key, value in state.items() if is_foreign(value)]
        for key in foreign:
            rank_zero_warn(
                f"{key} of {name} in the checkpoint is {state[key]}, outside of the run's folders: forgotten"
            )
            state[key] = ""
        if isinstance(kept := state.get("best_k_models"), dict):
            state["best_k_models"] = {
                path: score for path, score in kept.items() if not is_foreign(path)
            }


def loader_state(lightning_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """State of the training data's loader, if it was a single ``ResumableLoader``."""
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    states = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states[0] if len(states) == 1 and "random_state" in states[0] else None


def check_data_position(lightning_state: dict[str, Any], datamodule: object, path: Path) -> None:
    """Check whether a checkpoint's position in the training data is of this run's kind of data; drop it otherwise.

    Raises:
        CheckpointError: If both have a data module, of different kinds.
    """
    expected = type(datamodule).__qualname__ if isinstance(datamodule, MegatronDataModule) else None
    states = {name: state for name, state in lightning_state.items() if isinstance(state, Mapping)}
    # A conversion writes the state of each of our data modules, without an order.
    saved = [name for name, state in states.items() if state.get("train_order") is not None]
    if expected in states or not (expected or saved):
        return
    if expected and saved:
        raise CheckpointError(
            f"data of checkpoint {path}: expected {expected}, got {' or '.join(saved)}; resume with the same kind, or "
            "begin a new run with the weights: MegatronStrategy(load_weights_only=True)"
        )
    lightning_state.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop(
        "combined_loader", None
    )
    rank_zero_warn(
        f"{path} has no position in the data of {expected or 'this loader'}: the training data begins anew"
    )


def close_finished_epoch(lightning_state: Mapping[str, Any]) -> None:
    """Make the next epoch start at its first batch, if the last one was finished.

    Lightning 2.6.6 (loops/training_epoch_loop.py:reset) resumes a run of ``max_steps`` that ended, or was saved, at the
    end of an epoch with one stray batch of the finished epoch, and restarts the next epoch's order after it.
    """
    fit_loop = lightning_state["loops"]["fit_loop"]
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    if epochs["total"]["processed"] == epochs["total"]["ready"] and batches["is_last_batch"]:
        for counts in epochs.values():  # if it was saved in on_train_epoch_end
            counts["completed"] = counts["processed"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
