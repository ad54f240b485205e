"""How does a new run take from a checkpoint only what it can use? Weights that fit, and the moments if they are wanted.

Random states, learning rate and step count stay those of the new run, except for the step count of Adam's moments,
without which they would be scaled as if they had just begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling

from lightning_megatron.engine.checkpoint import load
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_state import RunState, check_means_the_same, sharded_state
from lightning_megatron.engine.collectives import on_all_ranks_alike
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


class _VocabularyRows:
    """This rank's rows of a weight that has one for each token, as they were before loading.

    megatron-core 0.16.1 (dist_checkpointing/strategies/torch.py) makes all rows zero before it reads those that are
    there, so that tokens without any would have zeros for ever.
    """

    def __init__(self, weight: ShardedTensor) -> None:
        assert weight.data is not None
        self.name = weight.key
        self._rows = weight.data.detach()
        self._before = self._rows.clone()
        self._first = weight.global_offset[0]

    def put_back(self, first: int) -> None:
        """Let the rows of the tokens from ``first`` on be what they were."""
        begin = max(first - self._first, 0)
        self._rows[begin:].copy_(self._before[begin:])


def _vocabulary_rows(state: Mapping[str, Any]) -> list[_VocabularyRows]:
    weights = (each for each in nested_values(dict(state)) if isinstance(each, ShardedTensor))
    return [_VocabularyRows(weight) for weight in weights if weight.allow_shape_mismatch]


def _surplus(more: int, fewer: int, names: Iterable[str]) -> list[str]:
    """What a vocabulary of ``more`` tokens has beyond one of ``fewer``."""
    return [f"rows {fewer} to {more - 1} of {name}" for name in names] if more > fewer else []


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


def load_what_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> Difference:
    """Load the weights that model and checkpoint both have; every rank must call.

    Of a vocabulary of another size, the rows of the tokens that both have.

    Raises:
        CheckpointError: If a weight has another shape or would mean something else, or a file is damaged.
    """
    on_all_ranks_alike(lambda: check_means_the_same(run, meta, path))
    with torch.no_grad():
        state = sharded_state(replace(run, optimizer=None), loaded_from=None)
        vocabulary = _vocabulary_rows(state)
        with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
            loaded, not_asked_for, not_there = dist_checkpointing.load(
                state, str(path), strict=StrictHandling.RETURN_ALL
            )
        for index, chunk in enumerate(run.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=False)
        # A model of the user's own need not describe itself.
        there, here = (model.get("vocab_size") or 0 for model in (meta["model_description"], run.model_description))
        for rows in vocabulary if there else []:
            rows.put_back(there)
    names = sorted({rows.name for rows in vocabulary} - {*not_there}) if there and here else []
    weights = [name for name in not_asked_for if not name.startswith("optimizer.")]
    return Difference(
        missing=sorted([*not_there, *_surplus(here, there, names)]),
        superfluous=sorted([*weights, *_surplus(there, here, names)]),
    )


def reload_masters(optimizer: MegatronOptimizer) -> None:
    """Have the optimizer's own copies of the weights follow what was loaded into the model."""
    optimizer.inner.reload_model_params()
