"""What a checkpoint holds of a run, and which runs can go on from it.

The sharded part is described to Megatron's ``dist_checkpointing``. The rest is plain data in ``meta.pt``: Lightning's
own dict, and for which models, optimizers and layouts the sharded part is good.

Of the optimizer there are, for each parameter, the entries ``optimizer.state.{param,exp_avg,exp_avg_sq}.NAME`` in the
shape of the weight: its fp32 master and its moments, as megatron-core's ``fully_reshardable`` format has them. So a run
goes on with or without distributed optimizer, at any number of data-parallel ranks and in another precision.
megatron-core 0.16.1 (optimizer/distrib_optimizer.py) writes that format by gathering everything on every rank, and its
optimizers without sharding write other names. Here each rank writes and reads exactly what it holds: its part of a
parameter is a range of consecutive numbers, which is cut into boxes (rest of a row, whole rows, start of a row).
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from lightning_megatron.engine.adapter_names import is_adapter
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

EXPERT_BIAS = "transformer_config_overrides.moe_router_enable_expert_bias"
"""In the description of a model whose router has biases and sigmoids, which no config of Hugging Face tells."""

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""megatron-core 0.16.1, optimizer/distrib_optimizer.py: the default type raises on every save."""


Part = Literal["all", "base", "adapters"]


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
    base: str | None = None
    """Of a model with adapters: where its frozen weights are, if weights alone shall be saved without them."""
    part: Part = "all"
    """Which weights are exchanged with a checkpoint."""

    @property
    def saved(self) -> RunState:
        """What a checkpoint takes: one to go on from is whole, one of weights alone leaves out what others have."""
        return replace(self, part="adapters") if self.optimizer is None and self.base is not None else self


def layout_of(topology: Topology) -> dict[str, Any]:
    """The sizes on which it depends which rank draws which random numbers."""
    sizes = asdict(topology.parallel)
    return {name: sizes[name] for name in ("tp", "pp", "vpp", "cp")} | {"dp": topology.dp}


def rng_file(rank: int) -> str:
    """Name of the file with the random states of a rank."""
    return f"rng_{rank:05d}.pt"


def sharded_weights(chunks: Iterable[Any], part: Part = "all") -> dict[str, Any]:
    """The weights as Megatron's sharded tensors over the live ones."""
    whole = {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(SHARDING)) for i, chunk in enumerate(chunks)}
    if part == "all":
        return whole
    wanted = part == "adapters"
    return {i: {name: each for name, each in of.items() if is_adapter(name) == wanted} for i, of in whole.items()}


def sharded_state(run: RunState, *, is_loading: bool = False) -> dict[str, Any]:
    """Weights and optimizer state as Megatron's sharded tensors; every rank must call."""
    state = sharded_weights(run.chunks, run.part)
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
        "part": run.part,
        "base": run.base,
        "hugging_face_config": None if run.hugging_face_config is None else dict(run.hugging_face_config),
    }


def _optimizer_format(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """What must be the same for one optimizer to read another one's state."""
    part = optimizer.parts[0]
    has_momentum = part.config.optimizer != "sgd" or part.config.sgd_momentum > 0
    groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in optimizer.param_groups}
    return {
        "implementation": _FORMAT,
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
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


# ---- which runs can go on -------------------------------------------------------------------------------------------

_FREE = {
    *("family", "max_position_embeddings", "add_attention_output_bias", "problem_type", "make_vocab_size_divisible_by"),
    *("decoder_start_token_id", "pad_token_id", "init_method_std", "scaled_residual_init"),
    *("embedding_dropout", "hidden_dropout", "attention_output_dropout", "attention_dropout", "activation_dropout"),
    *("classifier_dropout", "lora_dropout", "experts.load_balancing_loss_coef"),
}
"""Fields of a model in which a run may differ from its checkpoint; in any other one it is another model."""

_MAY_BE_STRETCHED = {
    *("rotary_base", "rotary_base_of_windows", "rope_scaling", "sliding_window", "sliding_window_layers"),
}
"""A new run may begin with the weights and another reach of positions; a run does not change it on the way."""

_SHOWS_IN_WEIGHTS = {
    *("architecture", "task", "vocab_size", "num_labels", "num_tokentypes", "share_embeddings_and_output_weights"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "embedding_layernorm", "position_embedding_type", "lora"),
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
    saved, wanted = _flat(meta["model_description"]), _flat(run.model_description)
    for name in (*wanted, EXPERT_BIAS):
        # Checkpoints from before there were adapters, or of models without biases, say nothing of these.
        is_told = name in saved or name in ("lora", EXPERT_BIAS)
        if name not in free and is_told and saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved.get(name)} there and {wanted.get(name)} here; "
                "give the model's config the checkpoint's values"
            )
    if meta.get("part") == "adapters" and run.base is None:
        raise CheckpointError(
            f"checkpoint {path}: expected a whole model, got the adapters of {meta['base']}; begin with that: "
            "MegatronModule(model=..., pretrained=True, lora=...), or MegatronModule.load_from_checkpoint"
        )


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description whose experts, if it has any, are fields like the others: ``experts.num_experts``."""
    flat = dict(description)
    if isinstance(experts := flat.get("experts"), Mapping):
        del flat["experts"]
        flat |= {f"experts.{name}": value for name, value in experts.items()}
    return flat


def _check_optimizer_fits(optimizer: MegatronOptimizer, meta: Mapping[str, Any], path: Path) -> None:
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights; resume from a full one, or begin a new run with "
            "MegatronStrategy(load_from=...) or load_weights_only=True"
        )
    for name, value in _optimizer_format(optimizer).items():
        written = meta["optimizer_format"].get(name)
        if written != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {written} there and {value} here; use "
                "the same, or MegatronStrategy(load_weights_only=True)"
            )


# ---- the optimizer's state ------------------------------------------------------------------------------------------

_FORMAT = "DistributedOptimizer"
"""What ``meta.pt`` calls the format above, after the only implementation that could read it once."""

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells parameter groups apart; each rank has all of them, in any order."""

_GROUP_SETTINGS = ("max_lr", "min_lr", "start_wd", "end_wd", "weight_decay", "betas", "eps", "momentum")
"""What a run sets for its parameter groups; the rest of them, as ``lr`` and ``step``, is where a run stands."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index along each axis, and size along each axis."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What this rank's optimizer holds of one parameter."""

    parameter: Tensor
    start: int
    """The first of the parameter's numbers that it holds, counted row by row."""
    is_sharded: bool
    """Whether other data-parallel ranks hold other numbers, instead of the same ones."""
    tensors: Mapping[str, Tensor]
    """``param``, which is the master, and the moments by name; each [numbers held]."""

    @property
    def stop(self) -> int:
        """The first number behind those that it holds."""
        return self.start + self.tensors["param"].numel()

    @property
    def is_own_master(self) -> bool:
        """Whether the master is the weight itself, as in fp32."""
        master = self.tensors["param"].untyped_storage().data_ptr()
        return bool(self.parameter.untyped_storage().data_ptr() == master)


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, models: Mapping[str, Any], *, is_loading: bool = False
) -> dict[str, Any]:
    """The state as sharded tensors over the live ones, and plain data; every rank must call.

    Args:
        optimizer: Whose state to save, or to load into.
        models: Sharded state of all chunks, with the parameters themselves as data.
        is_loading: Whether a checkpoint is about to be read: fp32 masters, which are weights, then get memory of their
            own, because the weights are read too, perhaps with fewer digits.
    """
    placements = _placements(models)
    entries: dict[str, ShardedTensor] = {}
    for number, held in _all_held(optimizer):
        for name, tensor in held.tensors.items():
            flat = torch.empty_like(tensor) if is_loading and name == "param" and held.is_own_master else tensor
            pieces = _pieces(placements[id(held.parameter)], held, flat, f"optimizer.state.{name}")
            entries |= {f"{number}.{name}.{index}": piece for index, piece in enumerate(pieces)}
    return {"param_state": entries, "param_state_sharding_type": "fully_reshardable", **_plain_state(optimizer)}


@torch.no_grad()
def restore_optimizer_state(optimizer: MegatronOptimizer, loaded: Mapping[str, Any]) -> None:
    """Take over what was loaded after the weights are back; every rank must call.

    The settings of the optimizer stay those that it was made with, so they may change on the way.

    Args:
        optimizer: The one that ``sharded_optimizer_state`` was asked about.
        loaded: What became of its answer; masters and moments are in place already, except fp32 masters.
    """
    entries = loaded["param_state"]
    for number, held in _all_held(optimizer):
        prefix = f"{number}.param."
        # In the order in which they were asked for.
        pieces = sorted((int(key.removeprefix(prefix)), key) for key in entries if key.startswith(prefix))
        if held.is_own_master and pieces:
            held.tensors["param"].copy_(torch.cat([entries[key].flatten() for _, key in pieces]))
    plain = loaded.get("optimizer", loaded)
    saved = {_identity(group): group for group in plain["param_groups"]}
    for group in optimizer.param_groups:
        kept = {"params", *(name for name in _GROUP_SETTINGS if name in group)}
        group.update({name: value for name, value in saved[_identity(group)].items() if name not in kept})
    for part in optimizer.parts:
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and "grad_scaler" in loaded:
            scaler.load_state_dict(loaded["grad_scaler"])
        _share_masters(part)


def _share_masters(part: Any) -> None:
    """Where weights are masters, each data-parallel rank has just set its own part of them: gather the others."""
    if isinstance(part, DistributedOptimizer) and part.config.params_dtype is torch.float32:
        for chunk in part.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _plain_state(optimizer: MegatronOptimizer) -> dict[str, Any]:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    scaler = getattr(optimizer.parts[0], "grad_scaler", None)
    return {"optimizer": {"param_groups": groups}} | ({} if scaler is None else {"grad_scaler": scaler.state_dict()})


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[name] for name in _GROUP_IDENTITY)


def _all_held(optimizer: MegatronOptimizer) -> Iterator[tuple[int, _Held]]:
    number = 0
    for part in optimizer.parts:
        if part.optimizer is not None:  # moments exist from here on, also before the first step
            part.optimizer.materialize_state()
        for parameter, master, start in _masters(part):
            moments = {
                name: value.view(-1)
                for name, value in part.optimizer.state.get(master, {}).items()
                if isinstance(value, Tensor) and value.shape == master.shape
            }
            yield (
                number,
                _Held(
                    parameter=parameter,
                    start=start,
                    is_sharded=isinstance(part, DistributedOptimizer),
                    tensors={"param": master.detach().view(-1), **moments},
                ),
            )
            number += 1


def _masters(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Each parameter, its master or this rank's part of it, and which number of the parameter comes first in it."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            first: int = part._get_model_param_range_map(parameter)["param"].start
            yield parameter, part.optimizer.param_groups[group]["params"][order], first
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((parameter, master, 0) for parameter, master in zip(parameters, masters, strict=True))
        yield from ((parameter, parameter, 0) for group in part.fp32_from_fp32_groups for parameter in group)
        return
    yield from ((parameter, parameter, 0) for parameter in part.get_parameters())


def _placements(models: Mapping[str, Any]) -> dict[int, list[ShardedTensor]]:
    """By parameter (``id``): where it lies in the whole model, in one place or in several."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(models))
    placements = {}
    for placement in nested_values(sharded):
        is_factory = isinstance(placement, ShardedTensorFactory)
        placements[id(placement.data)] = list(nested_values(placement.build())) if is_factory else [placement]
    return placements


def _pieces(placements: Sequence[ShardedTensor], held: _Held, flat: Tensor, prefix: str) -> Iterator[ShardedTensor]:
    """What ``flat``, the held numbers of one kind, is in the whole model, in its order."""
    for placement in placements:
        data = placement.data
        assert data is not None
        assert data.is_contiguous(), "parts of a parameter are whole rows of it"
        begin = data.storage_offset() - held.parameter.storage_offset()
        start, stop = max(held.start, begin), min(held.stop, begin + data.numel())
        for offset, size in boxes(tuple(data.shape), start - begin, stop - begin):
            count = math.prod(size)
            yield _piece(placement, (offset, size), flat[start - held.start :][:count], held, prefix)
            start += count


def _piece(placement: ShardedTensor, box: Box, numbers: Tensor, held: _Held, prefix: str) -> ShardedTensor:
    offset, size = box
    prepended = placement.prepend_axis_num
    shape = (1,) * prepended + size
    inside = (0,) * prepended + offset
    # The last component counts data-parallel ranks: of those that hold the same, the first one writes.
    replica = (*placement.replica_id[:2], 0) if held.is_sharded else placement.replica_id
    return ShardedTensor(
        key=f"{prefix}.{placement.key}",
        data=numbers.view(shape),
        dtype=numbers.dtype,
        local_shape=shape,
        global_shape=placement.global_shape,
        global_offset=tuple(a + b for a, b in zip(placement.global_offset, inside, strict=True)),
        axis_fragmentations=None,
        replica_id=replica,
        allow_shape_mismatch=placement.allow_shape_mismatch,
    )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The numbers ``start`` to ``stop`` of a tensor, counted row by row, as few boxes in the same order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], begin, end)]

    if first > last:
        return within(last, start - last * row, stop - last * row)
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return [*within(first - 1, start - (first - 1) * row, row), *whole, *within(last, 0, stop - last * row)]
