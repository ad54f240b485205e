"""What a checkpoint holds of a run, and which runs can go on from it.

The sharded part is described to Megatron's ``dist_checkpointing``. The rest is plain data in ``meta.pt``: Lightning's
own dict, and for which models, optimizers and layouts the sharded part is good.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.checkpoint.optimizer_state import FORMAT, sharded_optimizer_state
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.pickles import more_than_data
from lightning_megatron.engine.runtime import EngineRng
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import CheckpointError

FORMAT_VERSION = 1
"""Of the folder as a whole; another number is refused."""

OWN_KEYS = {"format_version", "layout", "has_optimizer", "optimizer_format", "model_description"}
"""What ``meta.pt`` always holds."""

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""megatron-core 0.16.1, optimizer/distrib_optimizer.py: the default type raises on every save."""


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
    hugging_face_config: Mapping[str, Any] | None = None
    """What Hugging Face's ``config.json`` of the model would hold, so that a checkpoint can be converted by itself."""


def layout_of(topology: Topology) -> dict[str, Any]:
    """The sizes on which it depends which rank draws which random numbers."""
    sizes = asdict(topology.parallel)
    return {name: sizes[name] for name in ("tp", "pp", "vpp", "cp")} | {"dp": topology.dp}


def rng_file(rank: int) -> str:
    """Name of the file with the random states of a rank."""
    return f"rng_{rank:05d}.pt"


def sharded_weights(chunks: Iterable[Any]) -> dict[str, Any]:
    """The weights as Megatron's sharded tensors over the live ones."""
    return {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(SHARDING)) for i, chunk in enumerate(chunks)}


def sharded_state(run: RunState, *, is_loading: bool = False) -> dict[str, Any]:
    """Weights and optimizer state as Megatron's sharded tensors; every rank must call."""
    state = sharded_weights(run.chunks)
    if run.optimizer is not None:
        state["optimizer"] = sharded_optimizer_state(run.optimizer, state, is_loading=is_loading)
    return state


# ---- meta.pt --------------------------------------------------------------------------------------------------------


def meta_of(run: RunState, lightning_state: Mapping[str, Any]) -> bytes:
    """The content of ``meta.pt``.

    Raises:
        CheckpointError: If Lightning's dict holds what could not be loaded again as plain data.
    """
    stream = io.BytesIO()
    try:
        torch.save({"lightning": plain_state(lightning_state), **_own_meta(run)}, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = more_than_data(error) if isinstance(error, pickle.UnpicklingError) else str(error)
        raise CheckpointError(
            f"its state must be plain data (numbers, strings, containers, tensors), but {reason}; correct the "
            "hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    return stream.getvalue()


def _own_meta(run: RunState) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "layout": layout_of(run.topology),
        "has_optimizer": run.optimizer is not None,
        "optimizer_format": None if run.optimizer is None else _optimizer_format(run.optimizer),
        "model_description": dict(run.model_description),
        "time": time.time(),
        "hugging_face_config": None if run.hugging_face_config is None else dict(run.hugging_face_config),
    }


def _optimizer_format(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """What must be the same for one optimizer to read another one's state."""
    part = optimizer.parts[0]
    has_momentum = part.config.optimizer != "sgd" or part.config.sgd_momentum > 0
    groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in optimizer.param_groups}
    return {
        "implementation": FORMAT,
        "algorithm": part.config.optimizer + ("" if has_momentum else " without momentum"),
        "multipliers of lr and weight decay": [list(group) for group in sorted(groups)],
    }


_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def plain_state(lightning_state: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dict in types that can be read back without running code, as far as they have such a form.

    Hyper-parameters are for people to read, so an object among them is kept as its text.
    """
    plain: dict[str, Any] = as_plain_data(lightning_state)
    for values in (plain[name] for name in _HYPER_PARAMETERS if name in plain):
        for name, value in values.items():
            if not _is_plain(value):
                kind = type(value).__name__
                rank_zero_warn(f"hyper-parameter {name!r} is a {kind}; the checkpoint keeps its text only")
                values[name] = repr(value)
    return plain


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


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


# ---- which runs can go on -------------------------------------------------------------------------------------------

_FREE = {
    "family",
    "max_position_embeddings",
    "add_attention_output_bias",
    "problem_type",
    "decoder_start_token_id",
    "pad_token_id",
    "embedding_dropout",
    "hidden_dropout",
    "attention_output_dropout",
    "attention_dropout",
    "activation_dropout",
    "classifier_dropout",
    "init_method_std",
    "scaled_residual_init",
    "make_vocab_size_divisible_by",
}
"""Fields of a model in which a run may differ from its checkpoint; in any other one it is another model."""

_MAY_BE_STRETCHED = {"rotary_base", "rope_scaling", "sliding_window", "sliding_window_layers"}
"""A new run may begin with the weights and another reach of positions; a run does not change it on the way."""

_SHOWS_IN_WEIGHTS = {
    "architecture",
    "task",
    "vocab_size",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "embedding_layernorm",
    "position_embedding_type",
    "num_tokentypes",
    "num_labels",
    "share_embeddings_and_output_weights",
}
"""What can differ although the weights that two models share mean the same: one of them has more, or other rows."""


def check_means_the_same(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Raise if weights that ``run`` and the checkpoint at ``path`` both have would be used in different ways.

    Raises:
        CheckpointError: If the models differ in what no weight's shape or name tells.
    """
    _check_same(run, meta, path, _FREE | _MAY_BE_STRETCHED | _SHOWS_IN_WEIGHTS)


def check_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Raise unless ``run`` can go on from the checkpoint at ``path``.

    Raises:
        CheckpointError: If the model or the optimizer is another one.
    """
    _check_same(run, meta, path, _FREE if run.optimizer is not None else _FREE | _MAY_BE_STRETCHED)
    if run.optimizer is not None:
        _check_optimizer_fits(run.optimizer, meta, path)


def _check_same(run: RunState, meta: Mapping[str, Any], path: Path, free: set[str]) -> None:
    saved, wanted = meta["model_description"], run.model_description
    for name in wanted:
        if name not in free and name in saved and saved[name] != wanted[name]:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved[name]} there and {wanted[name]} here; give the "
                "model's config the checkpoint's values"
            )


def _check_optimizer_fits(optimizer: MegatronOptimizer, meta: Mapping[str, Any], path: Path) -> None:
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights (by save_weights_only, or converted), so training "
            "cannot resume from it; use a full checkpoint, or begin a new run with its weights: "
            "MegatronStrategy(load_from=...), or load_weights_only=True"
        )
    for name, value in _optimizer_format(optimizer).items():
        written = meta["optimizer_format"].get(name)
        if written != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {written} there and {value} here; "
                "resume with the same optimizer options, or start from its weights with "
                "MegatronStrategy(load_weights_only=True)"
            )
