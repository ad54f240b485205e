"""How does a sharded run come back, exactly, on the same or on another layout?

A checkpoint is a directory in Megatron's distributed format, which any tp, pp, vpp and dp can load, plus one file per
rank with its random states and ``meta.pt`` with everything that is not sharded. It is written under another name and
renamed when it is complete, so a crash at any moment leaves the previous checkpoint intact.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_safety import (
    META,
    check_complete,
    check_only_data,
    load_plain,
    more_than_data,
)
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.rng import EngineRng
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import CheckpointError

_FORMAT_VERSION = 1
_OWN_KEYS = {"format_version", "layout", "has_optimizer", "optimizer_format", "model_description"}

_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""megatron-core 0.16.1, optimizer/distrib_optimizer.py: the default type raises on every save."""

_PARTIAL = ".partial"
_REPLACED = ".replaced"
_UNFINISHED_META = "meta.tmp"


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
        CheckpointError: If ``meta`` holds something that could not be loaded again as plain data, or the files cannot
            be written; ``path`` is then as it was.
    """
    partial = path.with_name(path.name + _PARTIAL)
    refusal = f"checkpoint {path} is not written"
    try:
        # First, because it is the only part that a user's own state can spoil.
        meta_bytes = _on_rank_0(lambda: _plain_bytes({**meta, **_own_meta(run)}), refusal)
        _on_rank_0(lambda: _make_empty(partial), refusal)
        finish_parameter_gathers(run.chunks)
        state = _sharded_state(run, is_loading=False)
        with failures_as_errors(refusal):
            dist_checkpointing.save(state, str(partial), content_metadata=dict(_SHARDING))
        on_all_ranks_alike(lambda: _write_random_states(run.rng, partial / _rng_file(dist.get_rank()), refusal))
        _on_rank_0(lambda: _finish(partial, path, meta_bytes), refusal)
    except Exception:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def read_meta(path: Path) -> dict[str, Any]:
    """``meta.pt`` of a complete checkpoint that is only data; every rank must call, and all raise alike.

    Raises:
        CheckpointError: If the checkpoint is missing, unfinished, damaged or could run code.
    """

    def check_and_read() -> dict[str, Any]:
        check_complete(path)
        check_only_data(path)
        meta = load_plain(path / META)
        if not isinstance(meta, dict) or not meta.keys() >= _OWN_KEYS:
            raise CheckpointError(f"checkpoint {path} was written by another strategy; give one of MegatronStrategy's")
        version = meta["format_version"]
        if version != _FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has the format version {version}, and this program reads {_FORMAT_VERSION}; load "
                "it with the version that wrote it"
            )
        return meta

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
    same_layout: bool = meta["layout"] == layout_of(run.topology)

    def check_and_read_random_states() -> dict[str, Any]:
        _check_fits(run, meta, path)
        rank = dist.get_rank() if same_layout else 0
        return {} if run.optimizer is None else dict(load_plain(path / _rng_file(rank)))

    random_states = on_all_ranks_alike(check_and_read_random_states)
    with torch.no_grad():
        state = _sharded_state(run, is_loading=True)
        with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
            loaded = dist_checkpointing.load(state, str(path))
        for index, chunk in enumerate(run.chunks):
            unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=True)
        if run.optimizer is not None:
            run.optimizer.inner.load_state_dict(loaded["optimizer"])
    if run.optimizer is None:
        return False
    if same_layout:
        run.rng.load_state_dict(random_states)
    else:
        run.rng.load_users_state(random_states)
    return same_layout


def remove(path: Path) -> None:
    """Delete a checkpoint, a link to one, or a file, whichever ``path`` is, and what a crash left beside it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    for folder in (path, path.with_name(path.name + _REPLACED), path.with_name(path.name + _PARTIAL)):
        if folder.is_dir():
            # Without its meta.pt the rest is recognised as incomplete, should the deletion be interrupted.
            (folder / META).unlink(missing_ok=True)
            shutil.rmtree(folder)


def recover(path: Path) -> Path:
    """``path``, or what it replaced if a crash fell between the two renames of ``save``."""
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and replaced.is_dir() else path


T = TypeVar("T")


def _on_rank_0(work: Callable[[], T], refusal: str) -> T:
    """The result of ``work`` on rank 0 (None elsewhere); what it raises there is raised on all ranks."""

    def only_there() -> T:
        if dist.get_rank() != 0:
            return None  # type: ignore[return-value]
        with failures_as_errors(refusal):
            return work()

    return on_all_ranks_alike(only_there)


def _plain_bytes(meta: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(meta, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = more_than_data(error) if isinstance(error, pickle.UnpicklingError) else str(error)
        raise CheckpointError(
            f"its state must be plain data (numbers, strings, containers, tensors), but {reason}; correct the "
            "hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    return stream.getvalue()


def _make_empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _write_random_states(rng: EngineRng, file: Path, refusal: str) -> None:
    with failures_as_errors(refusal):
        torch.save(rng.state_dict(), file)
        _sync(file)


def _finish(partial: Path, path: Path, meta: bytes) -> None:
    """Write ``meta.pt``, which says that all the rest is there, and give the folder its name."""
    unfinished = partial / _UNFINISHED_META
    unfinished.write_bytes(meta)
    _sync(unfinished)
    unfinished.rename(partial / META)
    check_complete(partial)
    _sync(partial)
    _swap_in(partial, path)


def _swap_in(partial: Path, path: Path) -> None:
    """Give ``partial`` its final name; at every moment the old or the new checkpoint exists whole.

    If ``path`` does not exist, what an interrupted swap left beside it may be the only one, and stays until the end.
    """
    replaced = path.with_name(path.name + _REPLACED)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _optimizer_format(run: RunState) -> dict[str, Any] | None:
    """What must be the same for one optimizer to read another one's state."""
    if run.optimizer is None:
        return None
    part = run.optimizer.parts[0]
    has_momentum = part.config.optimizer != "sgd" or part.config.sgd_momentum > 0
    groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in run.optimizer.param_groups}
    return {
        "implementation": type(part).__name__,
        "algorithm": part.config.optimizer + ("" if has_momentum else " without momentum"),
        "multipliers of lr and weight decay": [list(group) for group in sorted(groups)],
    }


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
    "architecture",
    "task",
    "num_layers",
    "num_decoder_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "normalization",
    "layernorm_epsilon",
    "activation",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "embedding_layernorm",
    "parallel_attention",
    "parallel_attention_norms",
    "position_embedding_type",
    "alibi_scaled",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "softmax_scale",
    "num_tokentypes",
    "num_labels",
    "scale_decoder_outputs",
    "share_embeddings_and_output_weights",
)
"""A model that differs here is another one, whatever its weights."""

_MAY_BE_STRETCHED = ("rotary_base", "rope_scaling", "sliding_window", "sliding_window_layers")
"""A new run may begin with the weights and another reach of positions; a run does not change it on the way."""


def _check_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    saved, wanted = meta["model_description"], run.model_description
    for name in _STRUCTURE + (_MAY_BE_STRETCHED if run.optimizer is not None else ()):
        if name in saved and name in wanted and saved[name] != wanted[name]:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved[name]} there and {wanted[name]} here; give the "
                "model's config the checkpoint's values"
            )
    if run.optimizer is not None:
        _check_optimizer_fits(_optimizer_format(run) or {}, meta, path)


def _check_optimizer_fits(wanted: Mapping[str, Any], meta: Mapping[str, Any], path: Path) -> None:
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights (save_weights_only), so training cannot resume from it; use a full "
            "checkpoint, or start a new run from its weights with MegatronStrategy(load_weights_only=True)"
        )
    for name, value in wanted.items():
        written = meta["optimizer_format"].get(name)
        if written != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {written} there and {value} here; "
                "resume with the same optimizer options, distributed_optimizer and precision, or start from its "
                "weights with MegatronStrategy(load_weights_only=True)"
            )
