"""How does a new run take from a checkpoint only what it can use? Weights that fit, and the moments if they are wanted.

Random states, learning rate and step count stay those of the new run, except for the step count of Adam's moments,
without which they would be scaled as if they had just begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from lightning_megatron.engine.checkpoint import load
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_state import RunState, sharded_state
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.wrap import unwrap

_OF_THE_MOMENTS = ("params", "step")
"""What a parameter group has that belongs to the checkpoint; the rest is of the run."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What did not find its counterpart, by Megatron-Core's names."""

    missing: list[str]
    """Weights of the model that the checkpoint has not; they keep their values."""
    superfluous: list[str]
    """Weights of the checkpoint that the model has not."""


def load_for_new_run(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Load weights, and the moments if ``run`` has an optimizer; every rank must call.

    Raises:
        CheckpointError: If the checkpoint is of another model, or has no optimizer state although one is wanted.
    """
    groups = [] if run.optimizer is None else [dict(group) for group in run.optimizer.param_groups]
    random_states = run.rng.state_dict()
    load(run, meta, path)
    run.rng.load_state_dict(random_states)
    if run.optimizer is not None:
        for group, before in zip(run.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in before.items() if name not in _OF_THE_MOMENTS})


def load_what_fits(run: RunState, path: Path) -> Difference:
    """Load the weights that model and checkpoint both have; every rank must call.

    Raises:
        CheckpointError: If a weight has another shape, or a file is damaged.
    """
    with torch.no_grad():
        state = sharded_state(replace(run, optimizer=None), loaded_from=None)
        with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
            loaded, not_asked_for, not_there = dist_checkpointing.load(
                state, str(path), strict=StrictHandling.RETURN_ALL
            )
        for index, chunk in enumerate(run.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=False)
    return Difference(
        missing=sorted(not_there),
        superfluous=sorted(name for name in not_asked_for if not name.startswith("optimizer.")),
    )


def reload_masters(optimizer: MegatronOptimizer) -> None:
    """Have the optimizer's own copies of the weights follow what was loaded into the model."""
    optimizer.inner.reload_model_params()
