"""Lightning's own dict in a checkpoint: what of it a run that loads it must not take as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.data.resumable import ENDED_EARLY
from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.paths import is_remote

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
    fresh = {name: value for name, value in lightning_state.items() if name not in dropped}
    fresh["epoch"] = 0
    fresh["global_step"] = 0
    fresh["lr_schedulers"] = []
    fresh["optimizer_states"] = []
    return fresh


def forget_addresses(lightning_state: Mapping[str, Any], trusted: Iterable[Path]) -> None:
    """Remove addresses of object stores from the states of callbacks: they would be opened when Lightning uses them.

    Args:
        lightning_state: The dict of a checkpoint, changed in place.
        trusted: Directories whose files may be named: that of the checkpoint, and those of the run's callbacks.
    """
    folders = [str(folder).rstrip("/") for folder in trusted if is_remote(folder)]

    def is_foreign(value: object) -> bool:
        if not isinstance(value, str):
            return False
        if "://" not in value and "::" not in value:
            return False
        is_within = any(f"{value}/".startswith(f"{folder}/") for folder in folders)
        return not is_within or "/.." in value

    callbacks = lightning_state.get("callbacks")
    if not isinstance(callbacks, Mapping):
        return
    for name, state in callbacks.items():
        if not isinstance(state, dict):
            continue
        for key, value in state.items():
            if is_foreign(value):
                rank_zero_warn(
                    f"{key} of {name} in the checkpoint is {value}, outside of the run's folders: forgotten"
                )
                state[key] = ""
        kept = state.get("best_k_models")
        if isinstance(kept, dict):
            own = {path: score for path, score in kept.items() if not is_foreign(path)}
            state["best_k_models"] = own


def loader_state(lightning_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """State of the training data's loader, if it was a single ``ResumableLoader`` or ``StatefulLoader``."""
    states = _fit_state(lightning_state).get("combined_loader", [])
    if len(states) == 1 and not {"random_state", "stream"}.isdisjoint(states[0]):
        state: dict[str, Any] = states[0]
        return state
    return None


def _fit_state(lightning_state: Mapping[str, Any]) -> dict[str, Any]:
    """State of Lightning's loop of fit; empty if there is none."""
    fit_loop = lightning_state.get("loops", {}).get("fit_loop", {})
    state: dict[str, Any] = fit_loop.get("state_dict", {})
    return state


def check_data_position(
    lightning_state: dict[str, Any],
    datamodule: object,
    path: Path,
) -> None:
    """Check whether a checkpoint's position in the training data is of this run's kind of data; drop it otherwise.

    Raises:
        CheckpointError: If both have a data module, of different kinds.
    """
    expected = ""
    if isinstance(datamodule, MegatronDataModule):
        expected = type(datamodule).__qualname__
    saved = []
    for name, state in lightning_state.items():
        # A conversion writes the state of each of our data modules, without an order.
        if isinstance(state, Mapping) and state.get("train_order") is not None:
            saved.append(name)
    if isinstance(lightning_state.get(expected), Mapping) or not (expected or saved):
        return
    if expected and saved:
        raise CheckpointError(
            f"data of checkpoint {path}: expected {expected}, got {' or '.join(saved)}; resume with the same kind, or "
            "begin a new run with the weights: MegatronStrategy(load_weights_only=True)"
        )
    _fit_state(lightning_state).pop("combined_loader", None)
    if isinstance(datamodule, MegatronDataModule):
        datamodule.restart()
    if lightning_state["global_step"] > 0:
        rank_zero_warn(
            f"{path} has no position in the data of {expected or 'this loader'}: the training data restarts"
        )


def close_finished_epoch(lightning_state: Mapping[str, Any]) -> None:
    """Make the next epoch start at its first batch, if the last one was finished.

    Lightning 2.6.6 (loops/training_epoch_loop.py:reset) resumes a run of ``max_steps`` that ended, or was saved, at the
    end of an epoch with one stray batch of the finished epoch, and restarts the next epoch's order after it.
    """
    fit_loop = lightning_state["loops"]["fit_loop"]
    epochs = fit_loop["epoch_progress"]
    batches = fit_loop["epoch_loop.batch_progress"]
    total = epochs["total"]
    if total["processed"] == total["ready"] and batches["is_last_batch"]:
        for counts in epochs.values():  # if it was saved in on_train_epoch_end
            counts["completed"] = counts["processed"]
        current = batches["current"]
        # on_train_batch_start returned -1: Lightning counts its batch as processed, and never as started. Its rows, and
        # those after it, are not trained on.
        if current["processed"] > current["started"]:
            for state in _fit_state(lightning_state).get("combined_loader", []):
                state[ENDED_EARLY] = True
        batches["current"] = dict.fromkeys(current, 0)
        batches["is_last_batch"] = False
