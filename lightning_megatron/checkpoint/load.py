"""Loading a checkpoint into a run, at any layout: resuming, and initial weights for a new run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling

from lightning_megatron.checkpoint.find import find_newest
from lightning_megatron.checkpoint.fits import (
    MAY_DIFFER,
    POSITION_FIELDS,
    VISIBLE_IN_WEIGHTS,
    check_fits,
    check_same,
)
from lightning_megatron.checkpoint.meta import check_complete, load_meta
from lightning_megatron.checkpoint.plain_data import load_plain
from lightning_megatron.checkpoint.shards import load_sharded
from lightning_megatron.checkpoint.state import (
    RunState,
    layout_of,
    rng_file,
    sharded_average,
    sharded_state,
    sharded_weights,
)
from lightning_megatron.checkpoint.table import read_table
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.entries import EMA
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.rank_zero import rank_zero_info, rank_zero_warn
from lightning_megatron.storage.checksums import verify_checksums
from lightning_megatron.storage.publish import recover, remove

_RESTORED_GROUP_KEYS = ("params", "step")
"""Keys of a parameter group that are loaded from the checkpoint; the others keep the run's values."""


def read_meta(path: Path) -> dict[str, Any]:
    """Read ``meta.pt`` of a complete, undamaged checkpoint; every rank must call, and all raise the same error.

    All files are compared with their checksums first; the ranks share this work.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged, of another format or could run code.
    """
    with raise_on_all_ranks():
        check_complete(path)
        verify_checksums(path, (dist.get_rank(), dist.get_world_size()))
    with raise_on_all_ranks():
        return load_meta(path)


def _with_saved_part(run: RunState, meta: Mapping[str, Any]) -> RunState:
    """``run`` with the part of its weights that the checkpoint has: all, or the adapters."""
    if meta.get("part") == "adapters":
        return replace(run, part="adapters")
    return run


def resume(run: RunState, path: Path) -> dict[str, Any]:
    """Load weights, and optimizer and random states if ``run`` has an optimizer; every rank must call.

    The engine's random states are per rank and are restored only on the layout that wrote them; on another one, the
    user's random states continue as those of rank 0.

    Returns:
        Lightning's dict.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged, unsafe or of another model, or lacks
            optimizer state that ``run`` needs.
    """
    path = recover(path)
    meta = read_meta(path)
    saved = meta["layout"]
    current = layout_of(run.topology)
    is_same_layout = saved == current
    random_states: dict[str, Any] = {}
    with raise_on_all_ranks():
        check_fits(run, meta, path)
        if run.optimizer is not None:
            rank = dist.get_rank() if is_same_layout else 0
            random_states = dict(load_plain(path / rng_file(rank)))
    _load(_with_saved_part(run, meta), path)
    if run.optimizer is not None:
        _resume_average(run, meta, path)
    if run.optimizer is not None and is_same_layout:
        run.runtime.load_state_dict(random_states)
    elif run.optimizer is not None:
        run.runtime.load_user_state(random_states)
        if _may_have_dropout(run):
            rank_zero_warn(
                f"{path} was written at {_sizes(saved)} and this run is at {_sizes(current)}: the engine's "
                "random states are not restored, so dropout masks differ; resume at the same sizes for an exact resume"
            )
    lightning_state: dict[str, Any] = meta["lightning"]
    return lightning_state


@torch.no_grad()
def _resume_average(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Load the average of the weights, if the run keeps one; every rank must call."""
    num_averaged = max(0, meta.get("num_averaged", 0))
    if run.average is None:
        if num_averaged:
            rank_zero_warn(
                f"checkpoint {path} has the average of {num_averaged} updates that EMA kept, and this run has no EMA: "
                "its checkpoints will have none; add the callback to continue the average"
            )
        return
    if num_averaged > 0:
        load_sharded(sharded_average(run), path)
    else:
        rank_zero_info(
            f"checkpoint {path} has no average of the weights: EMA begins one in this run"
        )
    run.average.num_updates = num_averaged


@torch.no_grad()
def load_average(run: RunState, path: Path) -> bool:
    """Load the average in a checkpoint in place of the weights that were trained; every rank must call.

    Args:
        run: With the weights of the checkpoint: those that were frozen stay.
        path: The checkpoint, which was verified before.

    Returns:
        Whether the checkpoint has an average; if not, the weights stay as they are.
    """
    path = recover(path)
    with raise_on_all_ranks():
        names = set(read_table(path).state_dict_metadata)
    state = sharded_weights(run.chunks)
    averaged: dict[str, Any] = {}
    for chunk, weights in state.items():
        averaged[chunk] = {
            name: weight
            for name, weight in weights.items()
            if isinstance(weight, ShardedBase) and EMA + weight.key in names
        }
    if not any(name.startswith(EMA) for name in names):
        return False
    add_prefix_for_sharding(averaged, EMA)
    # Layers of a stack that were frozen have no average, and keep their weights.
    loaded, _, _ = load_sharded(averaged, path, may_lack_elements=True)
    _load_state_dicts(run.chunks, loaded, strict=False)
    return True


def _may_have_dropout(run: RunState) -> bool:
    """Whether the model may draw dropout masks, which only a model of the user's ``model_provider`` does not tell."""
    if run.hugging_face_config is None:
        return True
    description = run.model_description
    return any(name.endswith("dropout") and description[name] for name in description)


def _sizes(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={size or 1}" for name, size in layout.items())


@torch.no_grad()
def _load(run: RunState, path: Path) -> None:
    """Load weights, and the optimizer state if ``run`` has an optimizer; every rank must call."""
    loaded, _, _ = load_sharded(sharded_state(run, is_loading=True), path)
    _load_state_dicts(run.chunks, loaded, strict=run.part == "all")
    if run.optimizer is not None:
        run.optimizer.load_sharded_state_dict(loaded["optimizer"])


def _load_state_dicts(
    chunks: list[Any],
    loaded: Mapping[str, Any],
    *,
    strict: bool = True,
) -> None:
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=strict)


@torch.no_grad()
def read_weights(chunks: list[Any], folder: Path) -> None:
    """Load the weights that ``save.write_weights`` wrote, at any layout, and delete them; every rank must call."""
    loaded, _, _ = load_sharded(sharded_weights(chunks), folder)
    _load_state_dicts(chunks, loaded)
    dist.barrier()
    if dist.get_rank() == 0:
        remove(folder)


# ---- new runs -------------------------------------------------------------------------------------------------------


@checks_options
@dataclass(frozen=True, kw_only=True)
class LoadFrom:
    """Where a new run takes its initial weights from. Its counts of steps and samples begin at 0.

    Args:
        path: A checkpoint, or a directory of some, of which the one with most steps is taken.
        step: The checkpoint to take from the directory instead; for a single checkpoint, the step that it must have.
        optimizer: Load the optimizer's moments, too.
        strict: Refuse a checkpoint that lacks weights of the model or has additional ones; otherwise a warning lists
            them.
    """

    path: str
    step: int | None = None
    optimizer: bool = False
    strict: bool = True

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ConfigError: If they contradict each other.
        """
        if not self.path:
            raise ConfigError(
                "load_from must not be empty; give a checkpoint or a directory of some, or leave it out"
            )
        if self.optimizer and not self.strict:
            raise ConfigError(
                "load_from: optimizer=True needs strict=True: new weights have no moments"
            )

    def resolve(self) -> Path:
        """Path of the checkpoint.

        Raises:
            CheckpointError: If it is missing or not complete.
        """
        return recover(find_newest(self.path, self.step, to_resume=self.optimizer).path)


def load_initial_weights(run: RunState, options: LoadFrom) -> Path:
    """Load the weights that ``options`` select into ``run``, inside the engine; every rank must call.

    Random states, learning rate and step count stay those of the new run, except for the step count of Adam's moments,
    without which their bias correction would be that of a first step.

    Args:
        run: With the optimizer if there is one.
        options: What to load.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged, or of another model.
    """
    path = options.resolve()
    meta = read_meta(path)
    if not options.strict:
        _load_what_fits(run, meta, path)
    else:
        _load_strictly(run, meta, path, with_optimizer=options.optimizer)
        rank_zero_info(f"The run begins with the weights of {path}")
    if run.optimizer is not None and not options.optimizer:
        run.optimizer.reload_masters()  # the optimizer's copies of the weights
        _report_new_moments(run.optimizer.state_format, meta)
    return path


def _report_new_moments(own: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Say that moments begin at zero where the checkpoint has those of another optimizer."""
    saved = (meta.get("optimizer_format") or {}).get("algorithm")
    if saved is not None and saved != own["algorithm"]:
        rank_zero_info(
            f"The moments of {own['algorithm']} begin at zero: the checkpoint has those of {saved}"
        )


def _load_strictly(
    run: RunState,
    meta: Mapping[str, Any],
    path: Path,
    *,
    with_optimizer: bool,
) -> None:
    """Load all weights; with the optimizer its state, too, but not the learning rates and other options in it."""
    optimizer = run.optimizer if with_optimizer else None
    own_options: list[dict[str, Any]] = []
    if optimizer is not None:
        own_options = [dict(group) for group in optimizer.param_groups]
    run_to_load = _with_saved_part(replace(run, optimizer=optimizer), meta)
    description = run.model_description
    has_lora = description.get("lora") is not None
    is_base = has_lora and meta["model_description"].get("lora") is None
    if optimizer is None and is_base:  # the adapters are new
        description = {**description, "lora": None}
        run_to_load = replace(run_to_load, part="base", model_description=description)
    with raise_on_all_ranks():
        check_fits(run_to_load, meta, path)
    _load(run_to_load, path)
    if optimizer is None:
        return
    for group, own in zip(optimizer.param_groups, own_options, strict=True):
        for name, value in own.items():
            if name not in _RESTORED_GROUP_KEYS:
                group[name] = value


@torch.no_grad()
def _load_what_fits(
    run: RunState,
    meta: Mapping[str, Any],
    path: Path,
) -> None:
    """Load the weights that both model and checkpoint have, and of vocabularies the rows of tokens that both have.

    megatron-core 0.16.1 (dist_checkpointing/strategies/torch.py) sets all rows to zero before it reads those that are
    there, so the others are restored.
    """
    with raise_on_all_ranks():
        check_same(run, meta, path, MAY_DIFFER | POSITION_FIELDS | VISIBLE_IN_WEIGHTS)
    state = sharded_weights(run.chunks, _with_saved_part(run, meta).part)
    vocabulary = [
        (weight, weight.data.detach().clone())
        for weight in nested_values(dict(state))
        if isinstance(weight, ShardedTensor) and weight.allow_shape_mismatch
    ]
    loaded, unexpected, absent = load_sharded(state, path, StrictHandling.RETURN_ALL)
    _load_state_dicts(run.chunks, loaded, strict=False)
    # A user's own model need not have a description.
    saved = meta["model_description"].get("vocab_size") or 0
    size = run.model_description.get("vocab_size") or 0
    names: list[str] = []
    if saved:
        for weight, initial in vocabulary:
            begin = max(saved - weight.global_offset[0], 0)
            weight.data[begin:].copy_(initial[begin:])
    if saved and size:
        names = sorted({weight.key for weight, _ in vocabulary} - absent)
    missing = sorted([*absent, *_surplus(size, saved, names)])
    extra = [name for name in unexpected if not name.startswith("optimizer.")]
    unused = sorted([*extra, *_surplus(saved, size, names)])
    if missing or unused:
        rank_zero_warn(
            f"The run begins with the weights of {path}, except for those that it lacks, which keep their initial "
            f"values ({', '.join(missing) or 'none'}); not used are {', '.join(unused) or 'none'}"
        )


def _surplus(
    more: int,
    fewer: int,
    names: Iterable[str],
) -> list[str]:
    """Rows that a vocabulary of ``more`` tokens has beyond one of ``fewer``, as a warning names them."""
    if more <= fewer:
        return []
    return [f"rows {fewer} to {more - 1} of {name}" for name in names]
