"""Where does a run go on that begins with a converted checkpoint? Lightning's dict, the optimizer's, random states.

What a checkpoint of ``MegatronStrategy`` says travels as it is. Of another program's run the number of steps and of
samples is known; what Lightning would have written after as many steps is built from these.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_megatron.convert.stored.base import Training
from lightning_megatron.convert.stored.distributed import StrategyTraining

RANDOM_STATES = "rng_*.pt"
"""Files of ``*.ckpt``, one for each rank."""

_DATA_MODULES = ("IndexedDataModule", "DatasetDataModule", "InstructionDataModule")
"""Those that count samples; a run has one of them, and Lightning looks for its name."""
_OPTIONS = ("lr", "weight_decay", "betas", "eps", "wd_mult", "lr_mult")
"""Of a parameter group, what another program's run says; more is the new run's business."""
_OF_A_GROUP = {
    "is_expert_parallel": False,
    "is_decoupled_lr": False,
    "lr_mult": 1.0,
    "wd_mult": 1.0,
    "max_lr": None,
    "min_lr": None,
}
"""What Megatron-Core tells parameter groups apart by, and where the run's own learning rates count (None)."""


def lightning_state(training: Training | None) -> dict[str, Any]:
    """Lightning's dict of a run that has come as far as ``training``."""
    if training is not None and training.lightning is not None:
        return dict(training.lightning)
    state: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": {},
    }
    if training is None or not training.has_optimizer:
        return state
    steps = training.iteration
    return {
        **state,
        "global_step": steps,
        "loops": _loops(steps),
        "callbacks": {},
        "optimizer_states": [{}],
        "lr_schedulers": [{"last_epoch": steps}],
        **_positions(training),
    }


def _loops(steps: int) -> dict[str, Any]:
    """Of a run in the middle of its first epoch (lightning 2.6.6, loops/fit_loop.py and training_epoch_loop.py)."""
    done = {"ready": steps, "completed": steps}
    begun_and_done = {**done, "started": steps}
    batches = {**begun_and_done, "processed": steps}
    epoch = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    optimizer = {
        "step": {"total": done, "current": done},
        "zero_grad": {"total": begun_and_done, "current": begun_and_done},
    }
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_progress": {"total": epoch, "current": epoch},
            "epoch_loop.state_dict": {"_batches_that_stepped": steps},
            "epoch_loop.batch_progress": {"total": batches, "current": batches, "is_last_batch": False},
            "epoch_loop.scheduler_progress": {"total": done, "current": done},
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        }
    }


def _positions(training: Training) -> dict[str, Any]:
    """The place in the data, for whichever data module the run will have."""
    if training.consumed_samples is None:
        return {}
    train = {
        "epoch": 0,
        "consumed_samples": training.consumed_samples,
        "steps": training.iteration,
        "earlier_samples": 0,
    }
    # Whose order the samples had is not known, so that the data module says that some may come again.
    return {name: {"train": train, "train_order": None} for name in _DATA_MODULES}


# ---- the optimizer --------------------------------------------------------------------------------------------------


def optimizer_format(training: Training | None) -> Mapping[str, Any] | None:
    """What ``MegatronStrategy`` compares before it loads an optimizer; None without one."""
    if training is None or not training.has_optimizer:
        return None
    # Not above: the engine's imports take seconds.
    from lightning_megatron.engine.optimizer_state import FORMAT

    algorithm = "adam"
    if isinstance(training, StrategyTraining) and training.optimizer_format is not None:
        algorithm = training.optimizer_format["algorithm"]
    multipliers = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in _param_groups(training)}
    return {
        "implementation": FORMAT,
        "algorithm": algorithm,
        "multipliers of lr and weight decay": [list(each) for each in sorted(multipliers)],
    }


def common_state(training: Training | None, sharding: Mapping[str, Any]) -> dict[str, Any]:
    """What ``common.pt`` holds: everything that is not sharded, and how the rest is."""
    common: dict[str, Any] = {"content_metadata": dict(sharding)}
    if training is None or not training.has_optimizer:
        return common
    state: dict[str, Any] = {"optimizer": {"param_groups": _param_groups(training)}}
    if isinstance(training, StrategyTraining) and "grad_scaler" in training.common["optimizer"]:
        state["grad_scaler"] = training.common["optimizer"]["grad_scaler"]
    (kind,) = sharding.values()
    return {"optimizer": {**state, "param_state_sharding_type": kind}, **common}


def _param_groups(training: Training) -> list[dict[str, Any]]:
    """Megatron-Core's groups: one whose weights decay, and one for biases and norms."""
    if isinstance(training, StrategyTraining):
        return [dict(group) for group in training.param_groups]
    groups = []
    for given in training.param_groups:
        group = {**_OF_A_GROUP, **{name: given[name] for name in _OPTIONS if name in given}}
        step = given.get("step")
        group["step"] = step if isinstance(step, int) else training.iteration
        group["default_config"] = (group["lr_mult"], group["wd_mult"]) == (1.0, 1.0)
        group["initial_lr"] = group["lr"]
        groups.append(group)
    return groups


# ---- random states --------------------------------------------------------------------------------------------------


def random_state_files(source: Path, *, is_same_layout: bool) -> list[Path]:
    """Files of a ``*.ckpt`` whose random states go on: all at the same layout, else those of the user on rank 0."""
    files = sorted(source.glob(RANDOM_STATES))
    return files if is_same_layout else files[:1]


def fresh_random_states(seed: int) -> dict[str, Any]:
    """The streams that users draw from, in the form of ``EngineRng.state_dict``, as if seeded with ``seed``."""
    version_of_state, words, gauss = random.Random(seed).getstate()
    kind, keys, position, has_gauss, cached = np.random.RandomState(seed % 2**32).get_state(legacy=True)
    return {
        "python": [version_of_state, list(words), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), 0.0],
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
