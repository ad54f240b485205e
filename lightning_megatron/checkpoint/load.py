"""Loading a checkpoint into a run, at any layout: resuming, and initial weights for a new run.

Megatron and torch plan which rank reads what. Their readers unpickle without restriction, or read files again that were
checked before: here they get only what was checked while it was read.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightning_megatron.checkpoint.find import (
    COMMON,
    check_backends,
    check_complete,
    find_newest,
    load_meta,
    load_plain,
    read_table,
    table_reader,
)
from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.checkpoint.save import (
    EXPERT_BIAS,
    RunState,
    layout_of,
    rng_file,
    sharded_state,
    sharded_weights,
)
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.storage.checksums import verify_checksums
from lightning_megatron.storage.failures import failures_as_errors
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
    return replace(run, part="adapters") if meta.get("part") == "adapters" else run


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
    saved, current = meta["layout"], layout_of(run.topology)
    with raise_on_all_ranks():
        check_fits(run, meta, path)
        rank = dist.get_rank() if saved == current else 0
        random_states = {} if run.optimizer is None else dict(load_plain(path / rng_file(rank)))
    _load(_with_saved_part(run, meta), path)
    if run.optimizer is not None and saved == current:
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
    loaded, _, _ = _load_sharded(sharded_state(run, is_loading=True), path)
    _load_state_dicts(run.chunks, loaded, strict=run.part == "all")
    if run.optimizer is not None:
        run.optimizer.load_sharded_state_dict(loaded["optimizer"])


def _load_state_dicts(chunks: list[Any], loaded: Mapping[str, Any], *, strict: bool = True) -> None:
    for index, chunk in enumerate(chunks):
        unwrap(chunk).load_state_dict(loaded[f"model{index}"], strict=strict)


@torch.no_grad()
def read_weights(chunks: list[Any], folder: Path) -> None:
    """Load the weights that ``save.write_weights`` wrote, at any layout, and delete them; every rank must call."""
    _load_state_dicts(chunks, _load_sharded(sharded_weights(chunks), folder)[0])
    dist.barrier()
    if dist.get_rank() == 0:
        remove(folder)


# ---- compatibility of run and checkpoint ----------------------------------------------------------------------------

_MAY_DIFFER = {
    *(
        "family",
        "max_position_embeddings",
        "add_attention_output_bias",
        "problem_type",
        "make_vocab_size_divisible_by",
    ),
    *("decoder_start_token_id", "pad_token_id", "init_method_std", "scaled_residual_init"),
    *(
        "embedding_dropout",
        "hidden_dropout",
        "attention_output_dropout",
        "attention_dropout",
        "activation_dropout",
    ),
    *("classifier_dropout", "lora_dropout", "experts.load_balancing_loss_coef"),
}
"""Fields of a model's description that may differ between a run and its checkpoint; any other difference makes it
another model."""

_POSITION_FIELDS = {
    *(
        "rotary_base",
        "rotary_base_of_windows",
        "rope_scaling",
        "sliding_window",
        "sliding_window_layers",
    ),
}
"""Fields of positions and attention range that may differ in a new run with the checkpoint's weights, but not when a
run resumes."""

_VISIBLE_IN_WEIGHTS = {
    *(
        "architecture",
        "task",
        "vocab_size",
        "num_labels",
        "num_tokentypes",
        "share_embeddings_and_output_weights",
    ),
    *(
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "embedding_layernorm",
        "position_embedding_type",
        "lora",
    ),
}
"""Fields that may differ although the weights that both models have mean the same: one model has more weights, or other
rows of the vocabulary."""


def check_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Raise unless ``run`` can continue from the checkpoint at ``path``.

    Raises:
        CheckpointError: If the model or the optimizer is another one.
    """
    _check_same(
        run,
        meta,
        path,
        _MAY_DIFFER if run.optimizer is not None else _MAY_DIFFER | _POSITION_FIELDS,
    )
    if run.optimizer is None:
        return
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights; resume from a full one, or begin a new run with "
            "MegatronStrategy(load_from=...) or load_weights_only=True"
        )
    for name, value in run.optimizer.state_format.items():
        saved = meta["optimizer_format"].get(name)
        if saved != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {saved} there and {value} here; use "
                "the same, or MegatronStrategy(load_weights_only=True)"
            )


def _check_same(run: RunState, meta: Mapping[str, Any], path: Path, free: set[str]) -> None:
    """Raise if a weight that ``run`` and the checkpoint both have would be used differently."""
    saved, expected = _flatten(meta["model_description"]), _flatten(run.model_description)
    for name in (*expected, EXPERT_BIAS):
        # Checkpoints written before there were adapters, or of models without biases, lack these fields.
        is_comparable = name in saved or name in ("lora", EXPERT_BIAS)
        if name not in free and is_comparable and saved.get(name) != expected.get(name):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved.get(name)} there and {expected.get(name)} here; "
                "give the model's config the checkpoint's values"
            )
    if meta.get("part") == "adapters" and run.base is None:
        raise CheckpointError(
            f"checkpoint {path}: expected a complete model, got the adapters of {meta['base']}; begin with that: "
            "MegatronModule(model=..., pretrained=True, lora=...), or MegatronModule.load_from_checkpoint"
        )


def _flatten(description: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a model's description: the experts' fields become ``experts.num_experts`` and so on."""
    flat = dict(description)
    if isinstance(experts := flat.get("experts"), Mapping):
        del flat["experts"]
        flat |= {f"experts.{name}": value for name, value in experts.items()}
    return flat


# ---- new runs -------------------------------------------------------------------------------------------------------


@explains_options
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
        optimizer = run.optimizer if options.optimizer else None
        groups = [] if optimizer is None else [dict(group) for group in optimizer.param_groups]
        run_to_load = _with_saved_part(replace(run, optimizer=optimizer), meta)
        is_base = (
            meta["model_description"].get("lora") is None
            and run.model_description.get("lora") is not None
        )
        if optimizer is None and is_base:  # the adapters are new
            run_to_load = replace(
                run_to_load, part="base", model_description={**run.model_description, "lora": None}
            )
        with raise_on_all_ranks():
            check_fits(run_to_load, meta, path)
        _load(run_to_load, path)
        for group, own in zip(
            [] if optimizer is None else optimizer.param_groups, groups, strict=True
        ):
            group.update(
                {name: value for name, value in own.items() if name not in _RESTORED_GROUP_KEYS}
            )
        rank_zero_info(f"The run begins with the weights of {path}")
    if run.optimizer is not None and not options.optimizer:
        run.optimizer.inner.reload_model_params()  # the optimizer's copies of the weights
    return path


@torch.no_grad()
def _load_what_fits(run: RunState, meta: Mapping[str, Any], path: Path) -> None:
    """Load the weights that both model and checkpoint have, and of vocabularies the rows of tokens that both have.

    megatron-core 0.16.1 (dist_checkpointing/strategies/torch.py) sets all rows to zero before it reads those that are
    there, so the others are restored.
    """
    with raise_on_all_ranks():
        _check_same(run, meta, path, _MAY_DIFFER | _POSITION_FIELDS | _VISIBLE_IN_WEIGHTS)
    state = sharded_weights(run.chunks, _with_saved_part(run, meta).part)
    weights = [tensor for tensor in nested_values(dict(state)) if isinstance(tensor, ShardedTensor)]
    vocabulary = [
        (tensor, tensor.data.detach().clone()) for tensor in weights if tensor.allow_shape_mismatch
    ]
    loaded, unexpected, absent = _load_sharded(state, path, StrictHandling.RETURN_ALL)
    _load_state_dicts(run.chunks, loaded, strict=False)
    # A user's own model need not have a description.
    saved, size = (
        model.get("vocab_size") or 0 for model in (meta["model_description"], run.model_description)
    )
    for weight, initial in vocabulary if saved else []:
        begin = max(saved - weight.global_offset[0], 0)
        weight.data[begin:].copy_(initial[begin:])
    names = sorted({weight.key for weight, _ in vocabulary} - {*absent}) if saved and size else []
    missing = sorted([*absent, *_surplus(size, saved, names)])
    extra = [name for name in unexpected if not name.startswith("optimizer.")]
    unused = sorted([*extra, *_surplus(saved, size, names)])
    if missing or unused:
        rank_zero_warn(
            f"The run begins with the weights of {path}, except for those that it lacks, which keep their initial "
            f"values ({', '.join(missing) or 'none'}); not used are {', '.join(unused) or 'none'}"
        )


def _surplus(more: int, fewer: int, names: Iterable[str]) -> list[str]:
    """Rows that a vocabulary of ``more`` tokens has beyond one of ``fewer``, as a warning names them."""
    return [f"rows {fewer} to {more - 1} of {name}" for name in names] if more > fewer else []


# ---- Megatron's loader ----------------------------------------------------------------------------------------------


def _load_sharded(
    state: dict[str, Any], path: Path, strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
) -> tuple[dict[str, Any], set[str], set[str]]:
    """Load as ``dist_checkpointing.load`` of megatron-core 0.16 to 0.19, without running code; every rank must call.

    From 0.17 on its strategies read the common part by themselves, with ``torch.load`` as the environment configures
    it.

    Returns:
        The loaded state; names in the checkpoint that ``state`` lacks; names in ``state`` that the checkpoint lacks.
    """
    with raise_on_all_ranks():
        check_backends(path)
        loaded, table = load_plain(path / COMMON), read_table(path)
    with failures_as_errors(f"checkpoint {path} does not fit this run, or is damaged"):
        prepared, non_persistent, factories = load_preprocess(state)
        merge(loaded, non_persistent)
        sharded, _ = extract_sharded_base(prepared)
        local_metadata, global_metadata = determine_global_metadata(sharded)
        sharded, unexpected, missing = validate_integrity_and_strict_load(
            sharded, strict, True, local_metadata, global_metadata, _entries(path, table)
        )
        merge(loaded, _read_shards(sharded, table_reader(path, table)))
        apply_factory_merges(loaded, factories)
    return loaded, unexpected, missing


def _entries(path: Path, table: Metadata) -> dict[str, Any]:
    """Entries of the checkpoint as Megatron describes them."""
    entries = table.state_dict_metadata.items()
    objects = [
        ShardedObject.empty_from_unique_key(k)
        for k, e in entries
        if isinstance(e, BytesStorageMetadata)
    ]
    tensors: dict[str, Any] = torch_dist.TorchDistLoadShardedStrategy().load_tensors_metadata(
        path, table
    )
    return {each.unique_key: each for each in objects} | tensors


def _read_shards(state: dict[str, Any], reader: FileSystemReader) -> dict[str, Any]:
    """Read shards as Megatron's ``TorchDistLoadShardedStrategy.load``, with a reader and a planner that run no code."""
    weights = [each for each in nested_values(state) if isinstance(each, ShardedTensor)]
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[
            each for each in weights if not each.allow_shape_mismatch
        ],
        allow_shape_mismatch_sharded_tensors={
            each.key: each for each in weights if each.allow_shape_mismatch
        },
    )
    by_key, flat_mapping, rename_mapping = torch_dist._replace_state_dict_keys_with_sharded_keys(
        state
    )
    tensors = torch_dist.mcore_to_pyt_state_dict(by_key, True)
    _load_state_dict(tensors, storage_reader=reader, planner=planner)
    unwrapped = {
        name: torch_dist._unwrap_pyt_sharded_tensor(value) for name, value in tensors.items()
    }
    loaded: dict[str, Any] = torch_dist._replace_sharded_keys_with_state_dict_keys(
        unwrapped, flat_mapping, rename_mapping
    )
    torch_dist._restore_dict_types(loaded, state)
    return loaded


class _LoadPlanner(torch_dist.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """As torch's, on plain data that was read and serialized again: two readers may interpret bytes differently."""
        data = read_pickle(value, foreign=False, name=f"its entry {read_item.dest_index.fqn}")
        stream = io.BytesIO()
        torch.save(data, stream)
        stream.seek(0)
        super().load_bytes(read_item, stream)

    def create_local_plan(self) -> Any:
        """As Megatron's, but raises for elements that are not in the files: they would keep their values in memory."""
        plan = super().create_local_plan()
        planned: Counter[str] = Counter()
        for item in plan.items:
            planned[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in self.state_dict.items():
            shards = tensor.local_shards() if hasattr(tensor, "local_shards") else ()
            expected = sum(shard.tensor.numel() for shard in shards)
            # The model's vocabulary may be larger than the checkpoint's.
            if planned[name] < expected and name not in (
                self.allow_shape_mismatch_sharded_tensors or {}
            ):
                raise CheckpointError(
                    f"{name}: expected {expected} elements on this rank, got {planned[name]}; weights that were frozen "
                    "have no optimizer state: freeze the same ones, or use MegatronStrategy(load_weights_only=True)"
                )
        return plan
