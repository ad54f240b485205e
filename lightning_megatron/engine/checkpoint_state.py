"""What of a run is in a checkpoint, and which runs can go on from it?

Everything sharded is described to Megatron's ``dist_checkpointing`` here; the rest, which ``meta.pt`` holds, says for
which models, optimizers and layouts the sharded part is good.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.optimizer_state import FORMAT, has_masters, sharded_optimizer_state
from lightning_megatron.engine.rng import EngineRng
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import CheckpointError

FORMAT_VERSION = 1
"""Of the folder as a whole; another number is refused."""

OWN_KEYS = {"format_version", "layout", "has_optimizer", "optimizer_format", "model_description"}
"""What ``meta.pt`` holds in every version of this program."""

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


def own_meta(run: RunState) -> dict[str, Any]:
    """What ``meta.pt`` says about the run itself, as plain data."""
    return {
        "format_version": FORMAT_VERSION,
        "layout": layout_of(run.topology),
        "has_optimizer": run.optimizer is not None,
        "optimizer_format": _optimizer_format(run),
        "model_description": dict(run.model_description),
        "has_checksums": True,
        "time": time.time(),
        "hugging_face_config": None if run.hugging_face_config is None else dict(run.hugging_face_config),
    }


def _optimizer_format(run: RunState) -> dict[str, Any] | None:
    """What must be the same for one optimizer to read another one's state."""
    if run.optimizer is None:
        return None
    part = run.optimizer.parts[0]
    has_momentum = part.config.optimizer != "sgd" or part.config.sgd_momentum > 0
    groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in run.optimizer.param_groups}
    return {
        "implementation": FORMAT,
        "algorithm": part.config.optimizer + ("" if has_momentum else " without momentum"),
        "multipliers of lr and weight decay": [list(group) for group in sorted(groups)],
    }


def rng_file(rank: int) -> str:
    """Name of the file with the random states of a rank."""
    return f"rng_{rank:05d}.pt"


def sharded_state(run: RunState, *, loaded_from: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Weights and optimizer state as Megatron's sharded tensors; every rank must call.

    Args:
        run: What to save, or to load into.
        loaded_from: ``meta.pt`` of the checkpoint that is about to be read; None to save.
    """
    state: dict[str, Any] = {
        f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(SHARDING)) for i, chunk in enumerate(run.chunks)
    }
    if run.optimizer is not None:
        written_as = FORMAT if loaded_from is None else loaded_from["optimizer_format"]["implementation"]
        state["optimizer"] = sharded_optimizer_state(
            run.optimizer, state, is_loading=loaded_from is not None, written_as=written_as
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
    _check_same(run, meta, path, [name for name in _STRUCTURE if name not in _SHOWS_IN_WEIGHTS])


def check_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Raise unless ``run`` can go on from the checkpoint at ``path``.

    Raises:
        CheckpointError: If the model or the optimizer is another one.
    """
    _check_same(run, meta, path, _STRUCTURE + (_MAY_BE_STRETCHED if run.optimizer is not None else ()))
    if run.optimizer is not None:
        _check_optimizer_fits(run.optimizer, _optimizer_format(run) or {}, meta, path)


def _check_same(run: RunState, meta: Mapping[str, Any], path: Path, names: Iterable[str]) -> None:
    saved, wanted = meta["model_description"], run.model_description
    for name in names:
        if name in saved and name in wanted and saved[name] != wanted[name]:
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved[name]} there and {wanted[name]} here; give the "
                "model's config the checkpoint's values"
            )


def _check_optimizer_fits(
    optimizer: MegatronOptimizer, wanted: Mapping[str, Any], meta: Mapping[str, Any], path: Path
) -> None:
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights (by save_weights_only, or converted), so training "
            "cannot resume from it; use a full checkpoint, or begin a new run with its weights: "
            "MegatronStrategy(load_from=...), or load_weights_only=True"
        )
    is_16bit = optimizer.parts[0].config.params_dtype is not torch.float32
    if is_16bit and not has_masters(meta["optimizer_format"]["implementation"]):
        raise CheckpointError(
            f"checkpoint {path} was written in 32-true by an earlier version, without a second copy of the weights for "
            "a 16-bit run; resume in 32-true, save there, and go on from that"
        )
    for name, value in wanted.items():
        if name == "implementation":
            continue  # optimizer_state.py reads what any of them wrote
        written = meta["optimizer_format"].get(name)
        if written != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {written} there and {value} here; "
                "resume with the same optimizer options, or start from its weights with "
                "MegatronStrategy(load_weights_only=True)"
            )
