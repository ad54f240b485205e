"""How does a sharded run come back, exactly, on the same or on another layout?

A checkpoint is a directory in Megatron's distributed format, which any tp, pp, vpp and dp can load, plus one file per
rank with its random states and ``meta.pt`` with everything that is not sharded. It is written under another name and
renamed when it is complete, so a crash at any moment leaves the previous checkpoint intact.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.checkpoint_safety import META, check_complete, check_only_data, load_plain
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.rng import EngineRng
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import CheckpointError

_FORMAT_VERSION = 1

_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""megatron-core 0.16.1, optimizer/distrib_optimizer.py: the default type raises on every save."""

_PARTIAL = ".partial"
_REPLACED = ".replaced"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The live objects of a run that a checkpoint is taken of, or loaded into."""

    chunks: list[Any]
    optimizer: MegatronOptimizer | None
    """None when only weights count."""
    rng: EngineRng
    topology: Topology
    model_description: Mapping[str, Any]
    """Plain data that identifies the model; loading into another model is refused."""


def save(run: RunState, meta: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; every rank must call with the same ``path``.

    Args:
        run: What to save; without an optimizer the checkpoint holds only weights.
        meta: Plain data of rank 0 that goes into ``meta.pt``.
        path: The final name, by convention ``*.ckpt``; an existing checkpoint of that name is replaced at the end.

    Raises:
        CheckpointError: If ``meta`` holds something that could not be loaded again as plain data.
    """
    partial = path.with_name(path.name + _PARTIAL)
    on_all_ranks_alike(lambda: _make_empty(partial) if dist.get_rank() == 0 else None)
    finish_parameter_gathers(run.chunks)
    dist_checkpointing.save(_sharded_state(run, is_loading=False), str(partial), content_metadata=dict(_SHARDING))
    on_all_ranks_alike(lambda: torch.save(run.rng.state_dict(), partial / _rng_file(dist.get_rank())))

    def finish() -> None:
        if dist.get_rank() != 0:
            return
        _write_meta({**meta, **_own_meta(run)}, partial / META)
        _swap_in(partial, path)

    on_all_ranks_alike(finish)


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.pt`` of a complete checkpoint that is only data; every rank must call, and all raise alike.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged or could run code.
    """

    def check_and_read() -> dict[str, Any]:
        check_complete(path)
        check_only_data(path)
        meta = load_plain(path / META)
        version = meta.get("format_version") if isinstance(meta, dict) else None
        if version != _FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has the format version {version}, and this program reads {_FORMAT_VERSION}; load "
                "it with the version that wrote it"
            )
        return dict(meta)

    return on_all_ranks_alike(check_and_read)


def load(run: RunState, meta: Mapping[str, Any], path: Path) -> bool:
    """Load weights, and optimizer and random states if ``run`` has an optimizer; every rank must call.

    The engine's random states are per rank and only come back on the layout that wrote them; on another one, the
    user's streams go on as those of rank 0 did.

    Returns:
        Whether the engine's random states came back.

    Raises:
        CheckpointError: If the checkpoint is of another model, or has no optimizer state although one is wanted.
    """
    on_all_ranks_alike(lambda: _check_fits(run, meta, path))
    with torch.no_grad():
        loaded = dist_checkpointing.load(_sharded_state(run, is_loading=True), str(path))
        for index, chunk in enumerate(run.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
        if run.optimizer is not None:
            run.optimizer.inner.load_state_dict(loaded["optimizer"])
    if run.optimizer is None:
        return False
    same_layout: bool = meta["layout"] == layout_of(run.topology)
    state = on_all_ranks_alike(lambda: load_plain(path / _rng_file(dist.get_rank() if same_layout else 0)))
    if same_layout:
        run.rng.load_state_dict(state)
    else:
        run.rng.load_users_state(state)
    return same_layout


def remove(path: Path) -> None:
    """Delete a checkpoint, a link to one, or a file, whichever ``path`` is."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        # Without its meta.pt the rest is recognised as incomplete, should the deletion be interrupted.
        (path / META).unlink(missing_ok=True)
        shutil.rmtree(path)


def recover(path: Path) -> Path:
    """``path``, or what it replaced if a crash fell between the two renames of ``save``."""
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.is_dir() else path


def _make_empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _swap_in(partial: Path, path: Path) -> None:
    """Give ``partial`` its final name; at every moment the old or the new checkpoint exists whole."""
    replaced = path.with_name(path.name + _REPLACED)
    if replaced.exists():
        shutil.rmtree(replaced)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync_directory(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_meta(meta: dict[str, Any], file: Path) -> None:
    temporary = file.with_suffix(".tmp")
    torch.save(meta, temporary)
    try:
        load_plain(temporary)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint not written: its state must be plain data (numbers, strings, containers, tensors), but "
            f"{error}; correct the hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.rename(file)


def layout_of(topology: Topology) -> dict[str, Any]:
    """The sizes on which it depends which rank draws which random numbers."""
    sizes = asdict(topology.parallel)
    return {name: sizes[name] for name in ("tp", "pp", "vpp", "cp")} | {"dp": topology.dp}


def _own_meta(run: RunState) -> dict[str, Any]:
    return {
        "format_version": _FORMAT_VERSION,
        "layout": layout_of(run.topology),
        "has_optimizer": run.optimizer is not None,
        "optimizer_format": _optimizer_format(run),
        "model_description": dict(run.model_description),
    }


def _optimizer_format(run: RunState) -> str | None:
    """Which of Megatron's optimizers wrote the state; another one cannot read it."""
    return None if run.optimizer is None else type(run.optimizer.parts[0]).__name__


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.pt"


def _sharded_state(run: RunState, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(_SHARDING)) for i, chunk in enumerate(run.chunks)
    }
    if run.optimizer is not None:
        # Megatron looks each parameter up in the models' state: flat for one chunk, by chunk for several.
        models = state["model0"] if len(run.chunks) == 1 else dict(state)
        state["optimizer"] = run.optimizer.inner.sharded_state_dict(
            models, is_loading=is_loading, metadata=dict(_SHARDING)
        )
    return state


_STRUCTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "normalization",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)


def _check_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    saved = meta["model_description"]
    for name in _STRUCTURE:
        if name in saved and name in run.model_description and saved[name] != run.model_description[name]:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved[name]} there and {run.model_description[name]} "
                "here; give the model's config the checkpoint's values"
            )
    if run.optimizer is not None and not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights (save_weights_only), so training cannot resume from it; use a full "
            "checkpoint, or start a new run from its weights with MegatronStrategy(load_weights_only=True)"
        )
    written, wanted = meta["optimizer_format"], _optimizer_format(run)
    if run.optimizer is not None and written != wanted:
        raise CheckpointError(
            f"checkpoint {path} holds the state of a {written}, and this run has a {wanted}; resume with the same "
            "distributed_optimizer and precision, or start from its weights with "
            "MegatronStrategy(load_weights_only=True)"
        )
